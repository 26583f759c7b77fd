"""Makes the fixtures of crates/engine/tests/text: a small vocabulary as GGUF and as tokenizer.json, the ids tokenizers
gives for tricky strings, and chats as transformers renders them.

    pip install gguf==0.19.0 tokenizers==0.23.3 transformers==5.22.2 jinja2
    python scripts/text_fixtures.py [MODEL.gguf]

Words are cut as the tokenizer.json of the models cut them. With a model (SmolLM2-135M-Instruct), ids of its vocabulary
and its chats are recorded as well. Two runs give the same bytes.
"""

import json
import sys
from pathlib import Path

from gguf import GGUFReader, GGUFWriter, TokenType
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
Größe, naïve café, straße. Привет, мир! 你好世界。 日本語のテキスト 😀😀 ½ ¾ ² ٣
    indented   with   many     spaces
it's I'm don't you've she'd they'll 7 77 777

 7

 7 on 7 and 7
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
    "Gr\u00f6\u00dfe caf\u00e9 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d \u65e5\u672c\u8a9e \U0001f600 \u0663\u0664",
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
    """A small vocabulary that merges across words and lines, so that a wrong cut shows. Some bytes have no token."""
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def recorded_ids(tokenizer: Tokenizer) -> list[dict]:
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
{{ ns.count }} {{ ns.last.role if ns.last else none }} {{ none }} {{ true }} {{ 1.0 }} {{ 1e-7 }}
{{ [1, 'a', none, {"k": "it's"}] }}
{{ messages | map(attribute='role') | join(', ') }} {{ bos_token }}{{ missing }}|{{ messages[::-1][0].role }}
{{ {"b": 1, "a": [1.5, true, none], "<>&'": "é\\n\\t\\x01\\""} | tojson }}
{{ {"b": 1, "a": {}} | tojson(sort_keys=true, separators=(',', ':')) }} {{ "é" | tojson(ensure_ascii=true) }}
{{ [[], [1, [2]], {}] | tojson(indent=4) }}
{{ "a-b".replace('-', '+').upper().strip('A') }} {{ "x" in messages[0] }} {{ messages[0].get('none', 'other') }}
{{ "abc"[1:] }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 'A' ~ 1 ~ 'B' }}
{{ "  x ".strip() | length }} {{ none is iterable }} {{ missing is iterable }}
{{ 1 is sequence }} {{ "a" is sequence }} {{ {} is sequence }} {{ "a,b".split(',') | last }}
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
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "skip", "content": "b"},
            {"role": "stop", "content": "c"},
        ]
    },
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


def with_pre(tokenizer: Tokenizer, pre: str) -> Tokenizer:
    """The vocabulary as the tokenizer.json of a model with these words has it."""
    tokenizer.pre_tokenizer = PRES[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    state = json.loads(tokenizer.to_str())
    state["model"]["ignore_merges"] = pre == "llama-bpe"
    changed = Tokenizer.from_str(json.dumps(state))
    changed.add_tokens([AddedToken(USER_DEFINED, normalized=False)])
    return changed


def record_model(path: Path) -> dict:
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    )
    tokenizer.pre_tokenizer = PRES[fields["tokenizer.ggml.pre"].contents()]()
    template = fields["tokenizer.chat_template"].contents()
    return {
        "texts": recorded_ids(tokenizer),
        "chats": [{"chat": chat, "expected": render(template, chat)} for chat in CHATS],
    }


def write(name: str, content: object) -> None:
    (FOLDER / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    write("chats.json", rendered_chats())
    write_gguf(tokenizer, FOLDER / "vocab.gguf", "gpt-2")
    write("ids.json", {pre: recorded_ids(with_pre(tokenizer, pre)) for pre in PRES})
    folder = FOLDER / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(with_pre(tokenizer, "qwen2").to_str() + "\n")
    config = {"eos_token": CONTROLS[2], "chat_template": TEMPLATES["chatml"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}\n')
    if len(sys.argv) > 1:
        write("smollm2.json", record_model(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
