"""A small model of Python's source, a character a token: minutes on a CPU, no network.

python data/pysource/prepare.py
python train.py config/train_pysource.py
"""

out_dir = "out-pysource"
dataset = "pysource"
eval_interval = 100
eval_iters = 20
log_interval = 20
always_save_checkpoint = False

gradient_accumulation_steps = 1
batch_size = 16
block_size = 64

n_layer = 4
n_head = 4
n_embd = 128

learning_rate = 4e-3
min_lr = 4e-4
max_iters = 2000
lr_decay_iters = 2000
warmup_iters = 50
beta2 = 0.99

compile = False
