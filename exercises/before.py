"""Six pieces of code, each broken once, and no two in the same way. You have ten minutes, before the workshop.

Write what is wrong with each piece behind it, as one of these words. Leave "" where you do not know.

    clock       a time is read while the device still works
    gradient    something cannot learn, because its gradient is cut off
    launches    the device waits for a host that launches too many operations
    layout      neighbouring lanes access memory far apart
    race        the result depends on the order in which programs run
    scale       a number is too large or too small by a factor

Then check. The first answer to each counts, so that you see in the evening what you have learnt:

    python exercises/check.py before
"""

#     for weight in model.parameters():  # 400 of them, small ones
#         weight.data *= 1 - rate * decay
#         weight.data -= rate * weight.grad
A = ""

#     scores = q @ k.T / math.sqrt(len(k))  # q and k: (tokens, channels of a head)
#     weights = torch.softmax(scores, dim=-1)
B = ""

#     start = time.perf_counter()
#     logits = model(tokens)  # on a GPU
#     print(f"forward: {time.perf_counter() - start} s")
#     loss_of(logits, targets).backward()
C = ""

#     @triton.jit
#     def row_sum_kernel(x_ptr, y_ptr, N_COLS: tl.constexpr):  # one program for each row of a matrix
#         row = tl.program_id(0)
#         x = tl.load(x_ptr + row * N_COLS + tl.arange(0, N_COLS))
#         total = tl.load(y_ptr)
#         tl.store(y_ptr, total + tl.sum(x))
D = ""

#     class Scale(torch.nn.Module):
#         def forward(self, x):  # self.gain is a parameter
#             y = torch.empty_like(x)
#             scale_kernel[(x.numel() // 1024,)](x, self.gain, y, BLOCK_SIZE=1024)  # y = gain * x, in Triton
#             return y
E = ""

#     @triton.jit
#     def column_sum_kernel(x_ptr, y_ptr, N_ROWS: tl.constexpr, N_COLS: tl.constexpr):  # one program for each column
#         col = tl.program_id(0)
#         x = tl.load(x_ptr + tl.arange(0, N_ROWS) * N_COLS + col)
#         tl.store(y_ptr + col, tl.sum(x))
F = ""
