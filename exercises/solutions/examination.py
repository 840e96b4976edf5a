"""Six pieces of code, each broken once, and no two in the same way. You have thirty minutes.

Write what is wrong with each piece into ANSWERS, as one of the words below, and mend the piece with as small a change
as you can. No piece raises an error, and each does what its docstring says, but for its mistake.

    clock       a time is read while the device still works
    gradient    something cannot learn, because its gradient is cut off
    launches    the device waits for a host that launches too many operations
    layout      neighbouring lanes access memory far apart
    race        the result depends on the order in which programs run
    scale       a number is too large or too small by a factor

Then check, as often as you like. It runs the pieces on the CPU, judges what they do, and measures no time:

    python -m exercises.check examination
"""

import time

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

ANSWERS = {
    "count_tokens_kernel": "race",
    "spectral_linear": "gradient",
    "penalize_repetition": "launches",
    "copy_bandwidth": "clock",
    "divide_columns_kernel": "layout",
    "accumulate_gradients": "scale",
}


@triton.jit
def count_tokens_kernel(expert_ptr, count_ptr, n_tokens, N_EXPERTS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Add the number of tokens that chose each expert to count (N_EXPERTS,), for a program's block of tokens."""
    tokens = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    chosen = tl.load(expert_ptr + tokens, mask=tokens < n_tokens, other=N_EXPERTS)
    experts = tl.arange(0, N_EXPERTS)
    counts = tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    # No other program comes between the load and the store of an atomic operation.
    tl.atomic_add(count_ptr + experts, counts)


def tokens_per_expert(chosen, n_experts):
    """Return how many tokens a mixture of experts sends to each; chosen (tokens,) has the expert of each token."""
    counts = torch.zeros(n_experts, dtype=torch.int32, device=chosen.device)
    grid = (triton.cdiv(len(chosen), 64),)
    count_tokens_kernel[grid](chosen, counts, len(chosen), N_EXPERTS=n_experts, BLOCK_SIZE=64)
    return counts


def spectral_linear(x, weight, left):
    """Apply a linear layer whose weight is divided by its largest singular value, which a GAN's discriminator needs.

    One step of the power iteration from the singular vector `left` of the last call estimates it. Return the output
    and the better vector. The vectors are constants for the gradient.
    """
    with torch.no_grad():
        right = F.normalize(weight.T @ left, dim=0)
        left = F.normalize(weight @ right, dim=0)
    # Outside: the weight learns through both of its places.
    scaled = weight / (left @ weight @ right)
    return F.linear(x, scaled), left


def penalize_repetition(logits, previous, penalty):
    """Return logits (sequences, vocabulary) that make the tokens which a sequence already has less likely.

    previous (sequences, length) has these tokens. The score of each is divided by the penalty if it is positive, and
    otherwise multiplied by it; a token that occurs twice is penalized once.
    """
    # Three launches for any number of sequences and tokens.
    score = torch.gather(logits, 1, previous)
    score = torch.where(score > 0, score / penalty, score * penalty)
    return torch.scatter(logits, 1, previous, score)


def copy_bandwidth(copy, n_bytes, calls=10):
    """Return the GB/s that copy() reaches, which launches work on the GPU that moves so many bytes."""
    for _ in range(3):  # the first call compiles
        copy()
    # The device has to be idle when the clock starts, and done when it stops.
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        copy()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return calls * n_bytes / seconds / 1e9


@triton.jit
def divide_columns_kernel(x_ptr, factor_ptr, y_ptr, n_rows, n_cols, BLOCK_SIZE: tl.constexpr):
    """Store x[i, j] / factor[j] in y[i, j], for a program's block of the elements; rows have no gaps between them."""
    index = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    # Neighbouring lanes have neighbouring columns, which are neighbours in memory.
    row, col = index // n_cols, index % n_cols
    mask = index < n_rows * n_cols
    x = tl.load(x_ptr + row * n_cols + col, mask=mask)
    factor = tl.load(factor_ptr + col, mask=mask, other=1.0)
    tl.store(y_ptr + row * n_cols + col, x / factor, mask=mask)


def divide_columns(x, factor):
    """Return x / factor, as SmoothQuant does with activations before they are rounded to 8 bits."""
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    divide_columns_kernel[grid](x, factor, y, *x.shape, BLOCK_SIZE=256)
    return y


def accumulate_gradients(model, batches):
    """Add the gradient of the mean loss of all tokens in all batches to the weights, and return this loss.

    A batch is (inputs, targets), of any number of sequences and tokens; a target of -100 is padding, and has no loss.
    """
    # Each token counts the same, in a short batch and in a long one.
    tokens = sum((targets != -100).sum() for _, targets in batches)
    total = 0.0
    for inputs, targets in batches:
        logits = model(inputs).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total
