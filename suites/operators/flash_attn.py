"""Dense causal attention by the flash-attn package."""

from functools import partial

from torch import Tensor

from nsa.config import NSAConfig
from nsa.routes import fa2
from suites.inputs import AttentionInputs
from suites.operators.protocol import DENSE, Forward, Operator, OperatorPart


def whole(x: AttentionInputs, _blocks: Tensor, _config: NSAConfig) -> Forward:
    attend = partial(fa2.flash_attention, provider="fa2-package", scale=x.q.shape[-1] ** -0.5)
    return lambda x: attend(x.q, x.k_sel, x.v_sel)


def refuses(x: AttentionInputs, _config: NSAConfig) -> str:
    return fa2.refusal_of_build("fa2-package", x.q, x.v_sel)


OPERATOR = Operator(
    name="dense-fa2-package",
    package="flash_attn",
    install="pip install --no-build-isolation flash-attn==2.8.3",
    licence="BSD-3-Clause",
    parts={"whole": OperatorPart(prepare=whole, definition=DENSE)},
    refuses=refuses,
)
