"""The loss of OpenAI's GPT-2 with 774 million weights on OpenWebText."""

init_from = "gpt2-large"
eval_only = True
eval_iters = 500
batch_size = 8
