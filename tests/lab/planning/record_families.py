"""Record what every causal family of transformers has in parameters, and what a token uses, by a forward on meta:
python tests/lab/planning/record_families.py, some minutes. families.json has a line for each family: of those whose
fields are read its config, of those that are refused why."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from pplab.lab.planning.config_fields import CHECKED
from pplab.lab.planning.config_on_meta import Unread, by_meta

FILE = Path(__file__).with_name("families.json")
SEQUENCE = 2048


def record() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    usual, lines = transformers.PretrainedConfig().to_dict(), []
    for kind in sorted(NAMES):
        found = {"kind": kind}
        try:
            fields = transformers.AutoConfig.for_model(kind).to_dict()
            model = by_meta(fields | {"model_type": kind}, SEQUENCE)
            found |= {"parameters": int(model.parameters), "used": int(model.used)}
            own = {name: value for name, value in fields.items() if name not in usual or usual[name] != value}
            told = {name: value for name, value in own.items() if value is False or value not in (None, "", 0)}
            found |= {"fields": told} if kind in CHECKED else {}
        except Unread as error:
            found["refused"] = str(error)
        except Exception as error:  # no default config
            found["refused"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        lines.append(json.dumps(found, default=str))
        print(lines[-1][:150], flush=True)
    head = json.dumps({"transformers": transformers.__version__})
    FILE.write_text("[\n" + ",\n".join([head, *lines]) + "\n]\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    record()
