"""GPT-2 with 124 million weights on OpenWebText: 12 x 1024 x 40 = 491,520 tokens an iteration, 300 billion in all.

python data/openwebtext/prepare.py
torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
"""

out_dir = "out-gpt2"
dataset = "openwebtext"
eval_interval = 1000
eval_iters = 200
log_interval = 10

gradient_accumulation_steps = 40  # of all processes together
batch_size = 12
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 768
bias = False

learning_rate = 6e-4
min_lr = 6e-5
max_iters = 600000
lr_decay_iters = 600000
warmup_iters = 2000
weight_decay = 1e-1

wandb_project = "owt"
wandb_run_name = "gpt2-124M"
