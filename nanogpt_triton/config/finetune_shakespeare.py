"""OpenAI's largest GPT-2 goes on with Shakespeare: 32 x 1024 tokens an iteration, nine of which see all of the text.

python data/shakespeare/prepare.py
python train.py config/finetune_shakespeare.py
"""

out_dir = "out-shakespeare"
dataset = "shakespeare"
init_from = "gpt2-xl"
eval_interval = 5
eval_iters = 40
always_save_checkpoint = False

gradient_accumulation_steps = 32
batch_size = 1
max_iters = 20
learning_rate = 3e-5
decay_lr = False
