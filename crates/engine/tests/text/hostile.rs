//! Templates that would take the process with them: each ends soon, in an error or in a bounded output, and takes a bounded
//! amount of memory.

use serde_json::{Map, json};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use warpsmith_engine::text::{Chat, ChatTemplate, Error};

/// Far above the limit of a rendering, for machines that are busy.
const MOST_TIME: Duration = Duration::from_secs(8);
const MOST_MEMORY: usize = 256 << 20;
const MOST_OUTPUT: usize = 32 << 20;

/// Counts what is allocated, and the most there was at a time.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A loop that does something 64 times to `x` in a namespace.
fn repeated(start: &str, step: &str, end: &str) -> String {
    format!(
        "{{% set n = namespace(x={start}) %}}{{% for i in range(64) %}}{{% set n.x = {step} %}}{{% endfor %}}{end}"
    )
}

/// Often: `range` ends at 100,000.
fn forever(body: &str) -> String {
    let loops = "{% for i in range(99999) %}".repeat(3);
    format!("{{% set n = namespace(x='') %}}{loops}{body}{}", "{% endfor %}".repeat(3))
}

/// A text of a million characters, and 30 times that.
/// Of no constants, which the compiler would compute: `k` is 1.
const BIG: &str =
    "{% set k = messages|length %}{% set b = 'abcdefghij' * (k * 100000) %}{% set h = b * 30 %}";

/// A text again and again, `#` being a number.
fn many(text: &str, count: usize) -> String {
    (0..count).map(|i| text.replace('#', &i.to_string())).collect()
}

fn templates() -> Vec<(&'static str, String)> {
    let with_big = |rest: &str| format!("{BIG}{rest}");
    let nested = |before: &str, inner: &str, after: &str, count: usize| {
        format!("{{{{ {}{inner}{} }}}}", before.repeat(count), after.repeat(count))
    };
    vec![
        // Operators.
        ("~ doubles", repeated("'ab'", "n.x ~ n.x", "{{ n.x }}")),
        ("+ doubles a text", repeated("'ab'", "n.x + n.x", "{{ n.x }}")),
        ("+ doubles a list", repeated("[1]", "n.x + n.x", "{{ n.x }}")),
        ("+ doubles a list that is counted", repeated("[1]", "n.x + n.x", "{{ n.x|length }}")),
        ("* of a text", repeated("'ab'", "n.x * 9", "{{ n.x }}")),
        ("* of a list", repeated("[1]", "n.x * 9", "{{ n.x|length }}")),
        ("* by the largest number", "{{ ([1] * 9223372036854775807)|length }}".into()),
        ("constants *", "{{ 'a' * 100000000 }}{{ 'b' * 100000000 }}{{ 'c' * 100000000 }}".into()),
        ("constants * in a list", format!("{{% set x = [{}] %}}", "'a' * 99999999, ".repeat(40))),
        ("constants **", "{{ 'a' * 10 ** 8 ~ 'a' * 10 ** 8 ~ 'a' * 10 ** 8 }}".into()),
        ("** of numbers", "{{ 9 ** 9 ** 9 ** 9 }}".into()),
        ("~ many times", with_big(&format!("{{% set x = h{} %}}", " ~ h".repeat(400)))),
        ("~ of lists", repeated("[1]", "(n.x ~ n.x)|list", "{{ n.x|length }}")),
        ("lists in lists, twice", repeated("[1]", "[n.x, n.x]", "{{ n.x }}")),
        ("lists in lists, twice, as JSON", repeated("[1]", "[n.x, n.x]", "{{ n.x|tojson }}")),
        ("lists in lists, twice, compared", repeated("[1]", "[n.x, n.x]", "{{ n.x == n.x + [] }}")),
        ("maps in maps, twice", repeated("{}", "{'a': n.x, 'b': n.x}", "{{ n.x }}")),
        ("lists in lists, deep", forever("{% set n.x = [n.x] %}")),
        ("maps in maps, deep", forever("{% set n.x = {'a': n.x} %}")),
        ("slices of slices", forever("{% set n.x = (n.x or messages)[0:] %}")),
        ("a namespace in itself", "{% set n = namespace() %}{% set n.x = n %}{{ n }}".into()),
        ("a namespace in its list", "{% set n = namespace() %}{% set n.x = [n] %}{{ n }}{{ n.x|tojson }}".into()),
        ("a loop in its namespace", "{% set n = namespace() %}{% for i in [1] %}{% set n.x = loop %}{% endfor %}{{ n }}".into()),
        ("slices backwards of nothing", "{{ ''[::-1] }}{{ [][::-1] }}{{ 'abc'[0:2:-1] }}{{ messages[1:9:-1] }}".into()),
        ("slices with the largest steps", "{{ 'abc'[::9223372036854775807] }}{{ 'abc'[::-9223372036854775807] }}".into()),
        // Filters and methods.
        ("slice", "{{ [1]|slice(1000000000000)|list }}".into()),
        ("slice by name", "{{ [1]|slice(count=1000000000000)|list }}".into()),
        ("batch", "{{ [1]|batch(1000000000000, 0)|list }}".into()),
        ("format", "{{ '%1000000000000d'|format(1) }}".into()),
        ("format of digits", "{{ '%.1000000000000f'|format(1.5) }}".into()),
        (".format", "{{ '{:>1000000000000}'.format(1) }}".into()),
        (".format of one argument many times", with_big("{{ ('{0}' * (k * 10000)).format(h) }}")),
        ("indent", "{{ 'a\nb'|indent(1000000000000) }}".into()),
        ("indent by name", "{{ 'a\nb'|indent(width=1000000000000) }}".into()),
        ("indent of many lines", "{{ ('a\n' * 1000000)|indent(1000) }}".into()),
        ("indent of JSON", "{{ messages|tojson(indent=1000000000000) }}".into()),
        ("replace", with_big("{{ b|replace('a', b) }}")),
        ("replace nothing", with_big("{{ b|replace('', b) }}")),
        (".replace", with_big("{{ b.replace('a', b) }}")),
        ("replace again and again", repeated("'aa'", "n.x|replace('a', 'aaaa')", "{{ n.x }}")),
        ("replace in all", with_big("{{ ([b] * 20)|map('replace', 'a', b)|list }}")),
        ("join", with_big("{{ ([b] * (k * 10000))|join(b) }}")),
        (".join", with_big("{{ h.join([1] * (k * 1000)) }}")),
        ("join of characters", with_big("{{ b|join(b) }}")),
        ("split", with_big("{{ ('a,' * (k * 15000000)).split(',')|length }}")),
        ("split at spaces", with_big("{{ ('a ' * (k * 15000000))|split|length }}")),
        ("lines", with_big("{{ ('\n' * (k * 30000000)).splitlines()|length }}{{ ('\n' * (k * 30000000))|lines|length }}")),
        ("list of characters", with_big("{{ h|list|length }}")),
        ("characters in order", with_big("{{ h|sort|length }}{{ h|unique|list }}")),
        ("zip", with_big(&format!("{{{{ ([1] * (k * 900000))|zip({})|list|length }}}}", "[1] * (k * 900000), ".repeat(200)))),
        ("chain", with_big(&format!("{{{{ ([1] * (k * 900000))|chain({})|list|length }}}}", "[1] * (k * 900000), ".repeat(200)))),
        ("sum of texts", with_big("{{ ([b] * 30)|sum }}")),
        ("capital letters", with_big("{{ ('\u{149}' * (k * 15000000))|upper }}")),
        ("escapes", with_big("{{ ('<' * (k * 30000000))|e }}")),
        ("escapes of JSON", with_big("{{ ('\\x01' * (k * 30000000))|tojson }}{{ [('\\x01' * (k * 30000000))] }}")),
        ("pprint", repeated("[1]", "[n.x, n.x]", "{{ n.x|pprint }}")),
        ("debug", with_big("{{ debug() }}{{ debug(h) }}")),
        (".count of nothing", "{{ 'abc'.count('') }}".into()),
        ("dates", with_big("{{ strftime_now(h) }}")),
        ("a message", with_big("{{ raise_exception(h) }}")),
        ("arguments", with_big(&format!("{{{{ dict({}) }}}}", "*([1] * (k * 900000)), ".repeat(400)))),
        ("a list of arguments", "{{ range(*range(99999)) }}".into()),
        ("a namespace of large values", with_big(&format!("{{% set n = namespace() %}}{}{{{{ n ~ n }}}}", many("{% set n.a# = h %}", 300)))),
        ("a namespace made large", with_big(&format!("{{{{ namespace({}) }}}}", many("a#=h, ", 300)))),
        // Captured output.
        ("a captured block", forever(&"a".repeat(1000)).replacen("{% for", "{% set y %}{% for", 1) + "{% endset %}"),
        ("captured doubles", "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}".into()),
        ("output", forever("{{ 'a' * 1000 }}")),
        ("output of the template's own", forever(&"a".repeat(10_000))),
        ("a macro's output", with_big(&("{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}".to_owned() + &forever("{{ f(h) }}")))),
        // Time.
        ("loops", forever("")),
        ("range", "{{ range(1000000000000)|list }}".into()),
        ("ranges of ranges", forever("{% for j in range(99999) %}{% endfor %}")),
        ("in", with_big(&forever("{% if 'x' in h %}{% endif %}"))),
        ("in, for all", with_big("{{ ([b] * 30 + ['x'] * (k * 100000))|select('in', h)|list|length }}")),
        ("comparisons", with_big(&("{% set g = h ~ 'x' %}{% set f = h ~ 'x' %}".to_owned() + &forever("{% if g == f %}{% endif %}")))),
        ("comparisons in a row", with_big(&("{% set g = h ~ 'x' %}{% set f = h ~ 'x' %}".to_owned() + &"{% if g == f %}{% endif %}".repeat(6000)))),
        ("characters by number", with_big(&forever("{% if h[29999999] %}{% endif %}"))),
        ("a loop over characters", with_big("{% for c in h %}{% endfor %}")),
        ("lengths", with_big(&forever("{% if h|length %}{% endif %}"))),
        // Depth.
        ("a macro in itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into()),
        ("a macro twice in itself", "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}".into()),
        ("a caller in itself", "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{% call f() %}{% endcall %}".into()),
        ("a block in itself", "{% block a %}{{ self.a() }}{% endblock %}".into()),
        ("a loop in itself", "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".into()),
        ("a template in itself", "{% include 'chat' %}{% extends 'chat' %}".into()),
        ("200,000 operators", nested("1 + ", "1", "", 200_000)),
        ("60,000 operators", nested("1 + ", "1", "", 60_000)),
        ("4,000 operators", nested("x + ", "1", "", 4_000)),
        ("signs", nested("-", "1", "", 200_000)),
        ("fewer signs", nested("-", "1", "", 8_000)),
        ("nots", nested("not ", "x", "", 30_000)),
        ("parentheses", nested("(", "1", ")", 100_000)),
        ("lists", nested("[", "1", "]", 100_000)),
        ("filters", nested("x", "", "|trim", 40_000)),
        ("fewer filters", nested("x", "", "|trim", 4_000)),
        ("attributes", nested("x", "", ".a", 100_000)),
        ("fewer attributes", nested("x", "", ".a", 4_000)),
        ("conditions", "{% if x %}".repeat(20_000)),
        ("other conditions", format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(20_000))),
        ("names in parentheses", format!("{{% set {} = 1 %}}", "(".repeat(8_000))),
        ("a long template", "a".repeat(10 << 20)),
        ("many tags", "{{ x }}".repeat(30_000)),
    ]
}

#[test]
fn no_template_takes_the_process_with_it() {
    let chat = Chat::new(json!([{ "role": "user", "content": "Hello" }]));
    let templates = templates();
    assert!(templates.len() >= 41);
    for (name, source) in templates {
        let before = NOW.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let start = Instant::now();
        let result = ChatTemplate::new(&source, Map::new()).and_then(|template| template.render(&chat));
        let (taken, memory) = (start.elapsed(), PEAK.load(Ordering::Relaxed).saturating_sub(before));
        let told = match &result {
            Ok(output) => format!("{} bytes", output.len()),
            Err(error) => error.to_string(),
        };
        println!("{name}: {told} ({} ms, {} MiB)", taken.as_millis(), memory >> 20);
        match result {
            Ok(output) => assert!(output.len() <= MOST_OUTPUT, "{name}"),
            Err(error) => {
                assert!(matches!(error, Error::Template(_) | Error::TemplateLimit { .. }), "{name}: {error}");
                assert!(told.len() < 2000 && !told.contains("fault of the renderer"), "{name}: {told}");
            }
        }
        assert!(taken < MOST_TIME, "{name} took {taken:?}");
        assert!(memory < MOST_MEMORY, "{name} took {memory} bytes");
    }
}

#[test]
fn what_real_templates_do_is_allowed() {
    let messages: Vec<_> = (0..1000)
        .map(|i| json!({ "role": if i % 2 == 0 { "user" } else { "assistant" }, "content": "word ".repeat(200) }))
        .collect();
    let chat = Chat::new(json!(messages));
    for (source, end) in [
        // All messages again for each, backwards too.
        (
            "{% for m in messages %}{% if messages[loop.index0 + 1:]|length == 0 %}{{ m.role }}{% endif %}{% endfor %}",
            "assistant",
        ),
        ("{% for m in messages[::-1] %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}", "word "),
        // Lists that grow.
        (
            "{% set n = namespace(l=[]) %}{% for m in messages %}{% set n.l = n.l + [m.role] %}{% endfor %}{{ n.l|length }}",
            "1000",
        ),
        (
            "{% set n = namespace(l='') %}{% for m in messages %}{% set n.l = n.l ~ m.role[0] %}{% endfor %}{{ n.l|length }}",
            "1000",
        ),
        (
            "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join('\\n') }}",
            "word ",
        ),
        ("{{ messages|tojson(indent=4) }}", "]"),
        (
            "{% for m in messages %}{{ (m.content.split('word')|last) ~ m['content'].replace('word', 'w') }}{% endfor %}",
            "w ",
        ),
        ("{{ '-' * 40 }}{{ 3 * 4 + 2 }}{{ [1, 2] + [3] }}{{ [0] * 3 }}", "[0, 0, 0]"),
    ] {
        let output = ChatTemplate::new(source, Map::new()).unwrap().render(&chat);
        let output = output.unwrap_or_else(|error| panic!("{source}: {error}"));
        assert!(output.ends_with(end), "{source}: {}", &output[output.len().saturating_sub(40)..]);
    }
}
