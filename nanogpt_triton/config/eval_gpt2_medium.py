"""The loss of OpenAI's GPT-2 with 350 million weights on OpenWebText."""

init_from = "gpt2-medium"
eval_only = True
eval_iters = 500
batch_size = 8
