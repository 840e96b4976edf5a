"""A character-level model of Shakespeare that overfits in a few minutes on a GPU: only the best checkpoint is kept.

python data/shakespeare_char/prepare.py
python train.py config/train_shakespeare_char.py
python train.py config/train_shakespeare_char.py --device=cpu --compile=False --block_size=64 --n_layer=4 --n_embd=128
"""

out_dir = "out-shakespeare-char"
dataset = "shakespeare_char"
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False

gradient_accumulation_steps = 1
batch_size = 64
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3
min_lr = 1e-4
max_iters = 5000
lr_decay_iters = 5000
warmup_iters = 100
beta2 = 0.99  # few tokens an iteration
