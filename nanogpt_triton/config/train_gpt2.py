"""GPT-2 with 124 million weights on OpenWebText: 12 x 1024 x 40 = 491,520 tokens an iteration, 300 billion in all.

python data/openwebtext/prepare.py
torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
"""

out_dir = "out-gpt2"
eval_interval = 1000
log_interval = 10

gradient_accumulation_steps = 5 * 8  # of all processes together
batch_size = 12
block_size = 1024
max_iters = 600000
lr_decay_iters = 600000

wandb_run_name = "gpt2-124M"
