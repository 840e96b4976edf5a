"""Our entry, with our kernels on a GPU and plain PyTorch on a CPU. Copy this file, and change what you like.

The judge calls train(task). It may use PyTorch and everything of this project, and ends with task.save(): what counts
are the seconds until then, and the loss of what was saved. README.md in this folder has the rules.
"""

import tiny_llama_v3 as llama

# On a CPU a long step costs more than it learns.
MODELS = {
    "laptop": dict(hidden_dim=128, num_layers=1, num_heads=4, ffn_dim=256, batch_size=32, num_steps=480),
    "small": dict(hidden_dim=512, num_layers=2, num_heads=8, ffn_dim=2048, batch_size=256, num_steps=800),
    "large": dict(hidden_dim=768, num_layers=2, num_heads=12, ffn_dim=3072, batch_size=512, num_steps=1200),
}
LEARNING_RATES = {"laptop": 5e-3, "small": 2e-3, "large": 2e-3}
CHECKED = 50  # steps after which it looks at the clock
SPARE = 10  # seconds for saving


def model(task):
    """Return the Config of the model and of its training."""
    return llama.Config(
        **MODELS[task.division],
        untied_head=True,
        vocab_size=task.limits.vocab_size,
        seq_len=task.sequences.shape[1] - 1,
        learning_rate=LEARNING_RATES[task.division],
        schedule="cosine",
        warmup_fraction=0.05,
        clip=1.0,
        use_amp=task.device == "cuda",
        impl="triton" if task.device == "cuda" else "sdpa",
        device=task.device,
        seed=task.seed,
    )


def train(task):
    """Train on the task's sequences, and save the model."""
    config = model(task)
    step = llama.TrainStep(config, task.device)
    batches = task.batches(config.batch_size)

    def warm_up_once(number):
        step.load(*next(batches))
        step.run()

    if task.device == "cuda":
        llama.make_ready(step, warm_up_once, count=3, graph=True, one_graph=True)
    for number in range(config.num_steps):
        if number % CHECKED == 0:
            step.synchronize()
            if task.seconds_left() < SPARE:
                break
        step.load(*next(batches))
        step.follow_schedule(number)
        step.run()
    task.save(config, step.state_dict())
