"""The toy contest's tokenizer: a fixed vocabulary of words and code fragments, longest match, exact round trip."""

from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from spo.tasks.toy import HEADERS

PAD, BOS, SEPARATOR, EOS, UNKNOWN = "<pad>", "<bos>", "<sep>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, BOS, SEPARATOR, EOS, UNKNOWN)
MAXIMUM_TOKENS = 128

# Connecting words carry their spaces, so a prompt has few tokens and no token is a lone space.
PROMPT_WORDS = (
    *(" of ", "the ", "numbers", " above ", " below ", " plus ", " minus ", " times ", " modulo ", " divided by "),
    *("sum", "count", "maximum", "minimum", "product", "spread", "average", "first", "last", "second ", "largest"),
    *("distinct ", "sorted ", "reversed ", "list", "squares", "cubes", "absolute ", "values", "doubles", "halves"),
    *("opposites", "successors", "predecessors", "remainders", "last digits", "even ", "odd ", "positive "),
    *("negative ", "nonzero ", "multiples", "non-multiples", "multi-digit ", "single-digit "),
)
DIGITS = tuple("0123456789")
# Longest match decides between fragments, so their order means nothing.
CODE_FRAGMENTS = (
    *HEADERS,
    *("b=[", "b=[]\n", "]\n", "b=list(", ")\n", "import math\n", "s=0\n", "s=1\n", "c="),
    *("for x in a:\n", " for x in a", " if ", ":\n", " b.append(", "for y in ", " s+=y\n", " s*=y\n"),
    *("map(lambda x:", "filter(lambda x:", ",a)", ",", "a", "b", "c", "s", "x", ")", "(", "]", "["),
    *("print(", "print(*", "sum(", "len(", "max(", "min(", "sorted(", "set(", "reversed(", "math.prod("),
    *("sum(1 for y in ", ",reverse=True)", ".pop(", "[0]", "[1]", "[-1]", "[-2]", "[::-1]", "abs(x)"),
    *("**", "*", "//", "%", "+", "-", "==", "!=0", "<", ">", "not ", "\n", " "),
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}" + SEPARATOR + "{% endif %}"
)


def vocabulary() -> tuple[str, ...]:
    """Return all tokens in the order of their ids."""
    return tuple(dict.fromkeys((*SPECIAL_TOKENS, *PROMPT_WORDS, *DIGITS, *CODE_FRAGMENTS)))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; the chat template writes bos, the statement and the separator."""
    ids = {token: index for index, token in enumerate(vocabulary())}
    # WordPiece without a prefix and without a pre-tokenizer is greedy longest match over the whole text.
    model = WordPiece(ids, unk_token=UNKNOWN, continuing_subword_prefix="", max_input_chars_per_word=1 << 20)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[SEPARATOR],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAXIMUM_TOKENS,
        padding_side="right",
    )


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `folder`."""
    build_tokenizer().save_pretrained(str(folder))
