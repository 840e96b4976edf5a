"""The entry of plain PyTorch: the model of entry.py, compiled on a GPU, and a loop without our step and kernels."""

import torch

import tiny_llama_v3 as llama

# As in entry.py.
MODELS = {
    "laptop": dict(hidden_dim=128, num_layers=1, num_heads=4, ffn_dim=256, batch_size=32, num_steps=480),
    "small": dict(hidden_dim=512, num_layers=2, num_heads=8, ffn_dim=2048, batch_size=256, num_steps=800),
    "large": dict(hidden_dim=768, num_layers=2, num_heads=12, ffn_dim=3072, batch_size=512, num_steps=1200),
}
LEARNING_RATES = {"laptop": 5e-3, "small": 2e-3, "large": 2e-3}
CHECKED = 50  # steps after which it looks at the clock
SPARE = 10  # seconds for saving


def train(task):
    """Train on the task's sequences, and save the model."""
    on_gpu, seq_len = task.device == "cuda", task.sequences.shape[1] - 1
    torch.manual_seed(task.seed)
    config = llama.Config(**MODELS[task.division], untied_head=True, vocab_size=task.limits.vocab_size, seq_len=seq_len)
    with torch.device(task.device):
        model = llama.TinyLlamaTriton(config, llama.OPERATIONS["sdpa"])
    call = torch.compile(model) if on_gpu else model
    rate = LEARNING_RATES[task.division]
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, config.num_steps, pct_start=0.05)
    for number, (tokens, targets) in zip(range(config.num_steps), task.batches(config.batch_size), strict=False):
        if number % CHECKED == 0:
            if on_gpu:
                torch.cuda.synchronize()
            if task.seconds_left() < SPARE:
                break
        with torch.autocast(task.device, torch.bfloat16, enabled=on_gpu):
            loss = call(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    task.save(config, dict(model.named_parameters()))
