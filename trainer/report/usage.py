"""The lines of a model card that use the model: MLflow, its server, transformers and vLLM."""

from __future__ import annotations

from typing import Final

from dropforge.run import RunSpec

_MLFLOW: Final = """```python
import mlflow

model = mlflow.pyfunc.load_model("models:/{address}")
print(model.predict([{{"prompt": "..."}}]))
```

As a server:

```sh
mlflow models serve -m models:/{address} --env-manager local --port 5001
curl http://127.0.0.1:5001/invocations -H 'Content-Type: application/json' \\
  -d '{{"dataframe_records": [{{"prompt": "..."}}]}}'
```
"""
_ALONE: Final = """
This folder needs nothing of ours; transformers 5 and 4.57 read it:

```python
{lines}
```
"""
_LINES: Final = {
    "causal-lm": """from transformers import pipeline

ask = pipeline("text-generation", model="FOLDER")
print(ask([{"role": "user", "content": "..."}]))  # or ask("...") where the training rows were plain texts""",
    "classification": """from transformers import pipeline

print(pipeline("text-classification", model="FOLDER")("..."))""",
    "sequence-to-sequence": """from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("FOLDER"), AutoModelForSeq2SeqLM.from_pretrained("FOLDER")
print(tokenizer.batch_decode(model.generate(**tokenizer("...", return_tensors="pt"))))""",
}
_VLLM: Final = "\n`vllm serve FOLDER` takes such folders too; Dropforge's tests do not run it.\n"


def usage(spec: RunSpec) -> str:
    """How to use a run's model. A prefix has no weights of its own, and MLflow alone puts it on its base."""
    task = str(spec.recipe.get("task", "causal-lm"))
    alias = (spec.recipe.get("promote") or {}).get("alias", "champion")
    text = _MLFLOW.format(address=f"{spec.family}@{alias}")
    if spec.recipe["train"]["method"] != "prefix":
        text += _ALONE.format(lines=_LINES[task]) + (_VLLM if task == "causal-lm" else "")
    return text.strip()
