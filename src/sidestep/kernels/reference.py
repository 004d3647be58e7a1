"""What the kernels compute, in float64: the truth that they are measured against.

Formulas: Adam, Kingma and Ba (2015), algorithm 1, as ``torch.optim.Adam`` documents it, its ``amsgrad`` by Reddi et al.
(2018), decoupled decay by Loshchilov and Hutter (2019); SGD as ``torch.optim.SGD`` documents it; Lion, Chen et al.
(2023), algorithm 2. All arrays are of one shape; moments are changed in place, and the new value is returned.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


def adam(
    value: Array,
    gradient: Array,
    moments: list[Array],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    is_decoupled: bool = False,
    maximize: bool = False,
) -> Array:
    """One step, number ``step`` from 1. ``moments``: first, second and, for amsgrad, the largest second so far."""
    beta1, beta2 = betas
    gradient = -gradient if maximize else gradient
    if is_decoupled:
        value = value * (1 - lr * weight_decay)
    else:
        gradient = gradient + weight_decay * value
    moments[0][...] = beta1 * moments[0] + (1 - beta1) * gradient
    moments[1][...] = beta2 * moments[1] + (1 - beta2) * gradient**2
    largest = moments[1]
    if len(moments) == 3:
        largest = moments[2][...] = np.maximum(moments[2], moments[1])
    denominator = np.sqrt(largest / (1 - beta2**step)) + eps
    return value - lr / (1 - beta1**step) * moments[0] / denominator


def sgd(
    value: Array,
    gradient: Array,
    moments: list[Array],
    *,
    is_first: bool,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Array:
    """One step. ``moments``: the momentum, or nothing; ``is_first``: it is made of this gradient."""
    gradient = (-gradient if maximize else gradient) + weight_decay * value
    if not moments:
        return value - lr * gradient
    moments[0][...] = gradient if is_first else momentum * moments[0] + (1 - dampening) * gradient
    return value - lr * (gradient + momentum * moments[0] if nesterov else moments[0])


def lion(
    value: Array,
    gradient: Array,
    moments: list[Array],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
) -> Array:
    """One step, with decoupled decay. ``moments``: the momentum."""
    beta1, beta2 = betas
    direction = np.sign(beta1 * moments[0] + (1 - beta1) * gradient)
    moments[0][...] = beta2 * moments[0] + (1 - beta2) * gradient
    return value * (1 - lr * weight_decay) - lr * direction
