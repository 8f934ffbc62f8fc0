"""Small real tokenizers with chat templates like Qwen's and Llama 3's, as models bring them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# Both write of tools, take an argument of the record's, and tell tool calls; Qwen's ends a turn
# with a newline after its end-of-sequence token, Llama's writes the beginning-of-sequence token.
QWEN = (
    "{%- if tools %}<|im_start|>system\n# Tools\n{%- for tool in tools %}\n{{ tool | tojson }}"
    "{%- endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call | tojson }}"
    "{%- endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- if tools is not none %}<|start_header_id|>system<|end_header_id|>\n\n"
    "Environment: ipython{% for tool in tools %}\n{{ tool | tojson(indent=2) }}{% endfor %}"
    "{{ date_string | default('26 Jul 2024') }}<|eot_id|>{% endif %}"
    "{%- for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_TEXTS = ["the sky is blue", "the sea is green", "what is the colour of the sky?", "system user"]


def save_qwen(path: Path) -> str:
    """Begins texts with no token; end of sequence: ``<|im_end|>``."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _save(path, special, QWEN, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def save_llama(path: Path) -> str:
    """Begins texts with ``<|begin_of_text|>``; end of sequence: ``<|eot_id|>``."""
    special = [
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|pad|>",
    ]
    names = {"bos_token": special[0], "eos_token": special[1], "pad_token": special[-1]}
    return _save(path, special, LLAMA, **names)


def _save(path: Path, special: list[str], template: str, **names: str) -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXTS * 9, trainer)
    bos = names.get("bos_token")
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)
