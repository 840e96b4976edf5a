"""The sizes that are measured."""

SIZES = {  # of tiny_llama_v3.Config
    "small": dict(batch_size=8, seq_len=128, hidden_dim=512, num_layers=8, num_heads=8),
    "medium": dict(batch_size=16, seq_len=512, hidden_dim=1024, num_layers=12, num_heads=16),
    "large": dict(batch_size=4, seq_len=2048, hidden_dim=2048, num_layers=16, num_heads=32),
    "tiny": dict(batch_size=2, seq_len=8, hidden_dim=32, num_layers=2, num_heads=4, vocab_size=32),
}
