"""Makes the fixtures of crates/engine/tests/text: a small vocabulary as GGUF and as tokenizer.json, ids that llama.cpp and
tokenizers give for tricky strings, and chats as transformers renders them.

    pip install gguf==0.19.0 tokenizers==0.23.3 transformers==5.22.2 jinja2 llama-cpp-python==0.3.36
    python scripts/text_fixtures.py [MODEL.gguf]

With a model (SmolLM2-135M-Instruct), its own ids and chats are recorded as well. Two runs give the same bytes.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from gguf import GGUFReader, GGUFWriter, TokenType
from llama_cpp import Llama
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(__file__).resolve().parent.parent / "crates/engine/tests/fixtures"
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<think>"
CORPUS = """
The quick brown fox jumps over the lazy dog. They're sure that it'll rain in 1999, 2024 and 12345; WE'LL SEE!
def add(a, b):
    return a + b  # sums 100 and 200


for i in range(10):
\tprint(i, add(i, 2 * i))
Größe, naïve café, straße. Привет, мир! 你好，世界。 日本語のテキスト 😀😀 ½ ¾ ² ٣
    indented   with   many     spaces
it's I'm don't you've she'd they'll
the then there these those thing think thought through
"""
TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "\n\n 7",
    " \u00bd",
    "a1b22c333d4444 2024-01-02 3.14",
    "I'm they'll WE'LL IT'S don'T",
    "  two  spaces\n\n\nlines\t\ttabs \r\n crlf",
    "def f(x):\n    return x**2  # \u00b2\n\n\n",
    "Gr\u00f6\u00dfe caf\u00e9 \u041f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d \u65e5\u672c\u8a9e \U0001f600 \u0663\u0664",
    "e\u0301 \u200b\u00a0\u3000x",
    "<|im_end|> <|im_start|>user\n<think>x</think>",
    "<|im_e<|im_end|>",
    "\u0004\u0006\u0013\u0014\u0016\u001d\u007f",
    "\u0080\u3fff\u7fff\U000fffff\U0010ffff",
    "a" * 300,
    " " * 70 + "x",
    "!!!???...---===>>><<<",
]
PRES = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: words(r"\p{N}{1,3}"),
    "qwen2": lambda: words(r"\p{N}"),
}


def words(numbers: str) -> pre_tokenizers.PreTokenizer:
    """The words of Llama 3 and Qwen 2, as their tokenizer.json cut them."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def train() -> Tokenizer:
    """A small vocabulary that merges across words, digits and lines, so that a wrong cut shows. Some bytes have no token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\n]{1,12}\n*| {1,8}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set("ĄĆĖĦ"))
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=CONTROLS, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    return tokenizer


def write_gguf(tokenizer: Tokenizer, path: Path, pre: str) -> None:
    state = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(state["vocab"].items(), key=lambda item: item[1])] + [USER_DEFINED]
    kinds = [TokenType.CONTROL if token in CONTROLS else TokenType.NORMAL for token in tokens]
    kinds[-1] = TokenType.USER_DEFINED
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATES["chatml"])
    # llama.cpp wants to know the model even when it reads the vocabulary alone.
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_ids(path: Path, texts: list[str]) -> list[dict]:
    model = Llama(str(path), vocab_only=True, verbose=False)

    def ids(text: str, special: bool) -> list[int]:
        return model.tokenize(text.encode(), add_bos=False, special=special) if text else []

    return [{"text": text, "plain": ids(text, False), "trusted": ids(text, True)} for text in texts]


def python_ids(tokenizer: Tokenizer) -> list[dict]:
    recorded = []
    for text in TEXTS:
        tokenizer.encode_special_tokens = False
        trusted = tokenizer.encode(text).ids
        tokenizer.encode_special_tokens = True
        recorded.append({"text": text, "plain": tokenizer.encode(text).ids, "trusted": trusted})
    return recorded


TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "tools": """{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '</tools>\\n' }}
{%- endif %}
{% for message in messages %}
    {%- set content = message.content | default('', true) | trim %}
    {%- if message.role == 'tool' %}
tool:{{ content }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
call:{% for call in message.tool_calls %}{{ call.function.arguments | tojson(indent=2) }}{% endfor %}

    {%- else %}
{{ message.role | upper }}:{{ content.split('</think>')[-1].lstrip('\\n') }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}{% generation %}go{% endgeneration %}{% endif %}""",
    "python": """{% set ns = namespace(count=0, last=none) %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% for key, value in message.items() %}
{{ key }}={{ value }};{{ value is string }};{{ value is mapping }}
    {% endfor %}
    {% set ns.last = message %}
{% endfor %}
{{ ns.count }} {{ ns.last.role if ns.last else none }} {{ none }} {{ true }} {{ 1.0 }} {{ 1e-7 }} {{ [1, 'a', none, {"k": "it's"}] }}
{{ messages | map(attribute='role') | join(', ') }} {{ bos_token }}{{ missing }}|{{ messages[::-1][0].role }}
{{ {"b": 1, "a": [1.5, true, none], "<>&'": "é\\n\\t\\x01\\""} | tojson }}
{{ {"b": 1, "a": {}} | tojson(sort_keys=true, separators=(',', ':')) }} {{ "é" | tojson(ensure_ascii=true) }}
{{ [[], [1, [2]], {}] | tojson(indent=4) }}
{{ "a-b".replace('-', '+').upper().strip('A') }} {{ "x" in messages[0] }} {{ messages[0].get('none', 'other') }} {{ "abc"[1:] }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 'A' ~ 1 ~ 'B' }} {{ "  x ".strip() | length }} {{ "a,b".split(',') | last }}
""",
}
CHATS = [
    {"messages": [{"role": "user", "content": "Hi <b>&amp;</b> 'quoted' \"double\" é 你好 😀"}]},
    {
        "messages": [
            {"role": "system", "content": "  Be  kind.\n"},
            {"role": "user", "content": "one\n\ntwo"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nthree"},
            {"role": "user", "content": ""},
        ],
        "add_generation_prompt": False,
    },
    {
        "messages": [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "w", "arguments": {"z": "Köln <&'>", "a": [1, 2.5, None, True]}}}],
            },
            {"role": "tool", "content": '{"t": 1e-05}'},
        ],
        "tools": [{"type": "function", "function": {"name": "w", "parameters": {"type": "object", "b": 1, "a": {}}}}],
    },
    {"messages": [{"role": "user", "content": "a"}, {"role": "skip", "content": "b"}, {"role": "stop", "content": "c"}]},
]


def render(template: str, chat: dict) -> str:
    rendered, _ = render_jinja_template(
        conversations=[chat["messages"]],
        tools=chat.get("tools"),
        chat_template=template,
        add_generation_prompt=chat.get("add_generation_prompt", True),
        bos_token="<s>",
    )
    return rendered[0]


def rendered_chats() -> list[dict]:
    cases = []
    for name, template in TEMPLATES.items():
        for chat in CHATS:
            cases.append({"name": name, "template": template, "chat": chat, "expected": render(template, chat)})
    return cases


def record_model(path: Path) -> dict:
    fields = GGUFReader(path).fields
    template = fields["tokenizer.chat_template"].contents()
    return {
        "texts": llama_ids(path, TEXTS),
        "chats": [{"chat": chat, "expected": render(template, chat)} for chat in CHATS],
    }


def write(name: str, content: object) -> None:
    (FOLDER / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    write("chats.json", rendered_chats())
    recorded = {}
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRES:
            path = Path(folder) / f"{pre}.gguf"
            write_gguf(tokenizer, path, pre)
            recorded[pre] = llama_ids(path, TEXTS)
        shutil.copy(Path(folder) / "gpt-2.gguf", FOLDER / "vocab.gguf")
    write("ids.json", recorded)
    for pre, build in PRES.items():
        tokenizer.pre_tokenizer = build()
        state = json.loads(tokenizer.to_str())
        state["model"]["ignore_merges"] = pre == "llama-bpe"
        state["added_tokens"].append({**state["added_tokens"][0], "content": USER_DEFINED, "special": False})
        state["added_tokens"][-1]["id"] = len(state["model"]["vocab"])
        same = python_ids(Tokenizer.from_str(json.dumps(state)))
        differing = [(a, b) for a, b in zip(recorded[pre], same, strict=True) if a != b]
        print(f"{pre}: tokenizers differs from llama.cpp in {len(differing)} of {len(same)} texts")
        for a, b in differing:
            print(f"  {a}\n  {b}")
        if pre == "qwen2":
            folder = FOLDER / "tokenizer"
            folder.mkdir(exist_ok=True)
            fast = Tokenizer.from_str(json.dumps(state))
            fast.decoder = decoders.ByteLevel()
            (folder / "tokenizer.json").write_text(fast.to_str() + "\n")
            config = {"eos_token": AddedToken(CONTROLS[2]).content, "chat_template": TEMPLATES["chatml"]}
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
            (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}\n')
    if len(sys.argv) > 1:
        write("smollm2.json", record_model(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
