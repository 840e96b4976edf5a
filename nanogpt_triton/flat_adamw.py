"""FlatAdamW for a GPT: the optimizer of tiny_llama_v3.py with the groups and the checkpoints of torch.optim.AdamW."""

import itertools

import torch

import tiny_llama_v3 as llama
from tiny_llama_v3 import MOMENTS

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # which lets a weight have a gradient of another type


class GPTAdamW(llama.FlatAdamW):
    """FlatAdamW that takes over a model, with the groups of the AdamW that its configure_optimizers() has made.

    Weights are in bf16 with low_precision: no autocast is needed. Of several micro-batches the gradients are added in
    fp32. param_groups, state_dict() and load_state_dict() are those of AdamW.
    """

    def __init__(self, model, adamw, low_precision=False, max_norm=None, micro_batches=1):
        group, *_ = self.param_groups = adamw.param_groups
        self.adamw = adamw  # which numbers the parameters in checkpoints
        decays = {p: g["weight_decay"] for g in self.param_groups for p in g["params"]}
        super().__init__(
            group["lr"],
            low_precision,
            group["betas"],
            group["eps"],
            decays.get,
            max_norm=max_norm,
            accumulate=micro_batches,
            gradient_dtype=torch.float32 if micro_batches > 1 else None,
        )
        # Our functions write gradients in the type of the weights only.
        is_owned = self.gradient_dtype is None or not low_precision
        for module in model.modules():
            if hasattr(module, "is_owned"):
                module.is_owned = is_owned
        self.own(model)
        for p in self.parameters:
            if p.main_grad.dtype != p.dtype:
                p.grad_dtype = None  # any: autograd adds each gradient in bf16 to a .grad in fp32
        self.steps = [0] * len(self.parameters)

    def zero_grad(self):
        """Let the backward pass overwrite the gradients, or those of several micro-batches add to zeros.

        Autograd adds as well. So all of them do the same, as one captured graph must.
        """
        super().zero_grad()
        if self.accumulate > 1:
            self.grad.zero_()
            for p in self.parameters:
                p.grad = p.main_grad

    def step(self):
        """Update all weights with the learning rate of param_groups."""
        self.lr = self.param_groups[0]["lr"]
        super().step()
        self.steps = [steps + 1 for steps in self.steps]

    def numbers(self):
        """Return the number in self.parameters of each parameter, in the order of AdamW's groups."""
        places = {p: number for number, p in enumerate(self.parameters)}
        return [places[p] for group in self.param_groups for p in group["params"]]

    def state_dict(self):
        """Return what AdamW's state_dict() would, with tensors of the host."""
        tensors = dict(self.each_state())
        moments = {name: [copy_to_host(moment) for moment in tensors[name]] for name in MOMENTS}
        state = {
            index: {"step": torch.tensor(float(self.steps[number]))} | {name: moments[name][number] for name in MOMENTS}
            for index, number in enumerate(self.numbers())
        }
        return self.adamw.state_dict() | {"state": state}

    def load_state_dict(self, state_dict):
        """Write the moments and counts of steps that state_dict() returns, ours or AdamW's; param_groups stay.

        ValueError if they are of another model.
        """
        state, numbers = state_dict["state"], self.numbers()
        groups = [len(group["params"]) for group in state_dict["param_groups"]]
        if groups != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(f"its groups have {groups} parameters, and not those of this model")
        moments = {name: [torch.zeros(p.shape) for p in self.parameters] for name in MOMENTS}
        for index, number in enumerate(numbers):
            for name in MOMENTS if index in state else ():
                if state[index][name].shape != self.parameters[number].shape:
                    raise ValueError(f"its {name} {index} has another shape than the weight of this model")
                moments[name][number] = state[index][name]
            self.steps[number] = int(state[index]["step"]) if index in state else 0
        beta_powers = [[repeated_product(beta, steps) for beta in self.betas] for steps in self.steps]
        self.load_state(moments | {"beta_powers": torch.tensor(beta_powers, dtype=torch.float64)})

    def model_state(self, model):
        """Return the state_dict() that the model would have with its weights in fp32, of the host."""
        weights = {p: copy_to_host(weight) for p, weight in zip(self.parameters, self.each_weight(), strict=True)}
        return {name: weights[p] for name, p in model.state_dict(keep_vars=True).items()}


def copy_to_host(tensor):
    """Return a copy that shares no memory: a checkpoint has the whole memory of each of its tensors."""
    return tensor.detach().to("cpu", copy=True)


def repeated_product(factor, times):
    """Return factor^times with the bits that as many multiplications give, one a step."""
    product = 1.0
    for _ in itertools.repeat(None, times):
        product *= factor
    return product


def obstacle(device, dtype, processes, micro_batches):
    """Return in words why a GPTAdamW cannot train a model, or None if it can; dtype is that of the products."""
    if reason := llama.triton_obstacle(device):
        return reason
    if dtype == torch.float16:
        return "gradients in float16 have to be scaled"
    if processes > 1:
        return "DistributedDataParallel exchanges the gradients of several processes"
    if dtype == torch.bfloat16 and micro_batches > 1 and not HAS_GRAD_DTYPE:
        return f"PyTorch {torch.__version__} adds up no gradients of weights in bfloat16 in float32"
    return None
