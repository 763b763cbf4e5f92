//! Parser bombs: 10 MiB documents are accepted or rejected quickly, with bounded error messages.
//!
//! The documents are deep, wide, repetitive, or wrong in a hundred thousand places.

use std::time::Duration;

use berth::sources::{
    manifest_decoder::{self, Manifest},
    references::ReferenceRule,
    static_pod::{self, ManifestOrigin},
};
use berth_config::FeatureGates;
use berth_types::PodSource;
use nix::time::{ClockId, clock_gettime};

/// Maximum size of a manifest, in bytes.
const SIZE: usize = 10 << 20;
/// Maximum number of values in a document.
const VALUES: usize = 200_000;
/// CPU time limit, for an unoptimized build on a slow and busy machine; a release build is twenty times as fast.
/// Quadratic algorithms take many minutes.
const LIMIT: Duration = Duration::from_secs(60);
/// Maximum length of an error message, in bytes.
const WORDS: usize = 200_000;

/// Start of all documents of a kind, as JSON members and as YAML.
struct Head {
    json: &'static str,
    yaml: &'static str,
}

const POD: Head = Head {
    json: r#""apiVersion":"v1","kind":"Pod","metadata":{"name":"x"}"#,
    yaml: "apiVersion: v1\nkind: Pod\nmetadata: {name: x}",
};
const CONFIGURATION: Head = Head {
    json: r#""apiVersion":"kubelet.config.k8s.io/v1beta1","kind":"KubeletConfiguration""#,
    yaml: "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration",
};

/// `head`, then items up to the length [`SIZE`], then `tail`; `%` in an item is replaced by its number.
fn filled(head: &str, item: &str, tail: &str) -> String {
    let room = SIZE - head.len() - tail.len();
    let mut text = head.to_owned();
    if item.contains('%') {
        let end = SIZE - tail.len() - item.len() - 10;
        let mut number = 0;
        while text.len() < end {
            text.push_str(&item.replace('%', &number.to_string()));
            number += 1;
        }
    } else {
        text.push_str(&item.repeat(room / item.len()));
    }
    if tail.starts_with([']', '}']) && text.ends_with(',') {
        text.pop();
    }
    text + tail
}

/// Documents in JSON or YAML flow style, with the bomb in the field `field`.
fn flows(head: &Head, field: &str) -> Vec<(String, String)> {
    let long = "k".repeat(SIZE / 4);
    let mut all = Vec::new();
    for (name, item, open, close) in [
        ("wide list", "1,", "[", "]"),
        ("empty lists", "[],", "[", "]"),
        ("wide map", "\"a%\":1,", "{", "}"),
        ("one key", "\"a\":1,", "{", "}"),
        ("deep lists", "[", "", ""),
        ("deep maps", "{\"a\":", "", ""),
        ("long text", "xxxxxxxxxxxxxxxx", "\"", "\""),
        ("escapes", "\\u0000\\n", "\"", "\""),
    ] {
        let json = |key: &str| {
            filled(&format!("{{{},\"{field}\":{{\"{key}\":{open}", head.json), item, &format!("{close}}}}}"))
        };
        all.push((format!("json: {name}"), json("x")));
        all.push((format!("json: {name} below a long name"), json(&long)));
        let yaml = filled(&format!("{}\n{field}: {{\"x\": {open}", head.yaml), item, &format!("{close}}}"));
        all.push((format!("yaml: {name}"), yaml));
    }
    all
}

/// Documents in YAML block style, with the bomb in the field `field`.
fn blocks(head: &Head, field: &str) -> Vec<(String, String)> {
    let shapes = [
        ("list", "", "  - a\n"),
        ("map", "", "  a%: 1\n"),
        ("one key", "", "  a: 1\n"),
        ("comments", "", "  # a\n"),
        ("documents", "", "---\n"),
        ("anchors", "", "  a%: &a% 1\n"),
        ("aliases", "  b: &b [1, 2, 3]\n", "  a%: *b\n"),
        ("tags", "", "  a%: !!str 1\n"),
        ("broken lines", "", "  a: b: c\n"),
        ("tabs", "", "\t\n"),
        ("literal", "  t: |\n", "   x\n"),
    ];
    let text = |first: &str, item: &str| filled(&format!("{}\n{field}:\n{first}", head.yaml), item, "");
    shapes.map(|(name, first, item)| (format!("yaml: {name}"), text(first, item))).into()
}

/// Lists of the maximum length, in an otherwise valid pod.
fn long_pods() -> Vec<(String, String)> {
    let one = r#"{"name":"c","image":"i"}"#;
    let shapes = [
        ("containers", r#"},"spec":{"containers":["#.to_owned(), r#"{"name":"c%","image":"i"},"#, "]}}".to_owned()),
        (
            "equal containers",
            r#"},"spec":{"containers":["#.to_owned(),
            r#"{"name":"c","image":"i"},"#,
            "]}}".to_owned(),
        ),
        (
            "init containers",
            format!(r#"}},"spec":{{"containers":[{one}],"initContainers":["#),
            r#"{"name":"c%","image":"i","ports":[{"hostPort":1,"containerPort":1}]},"#,
            "]}}".to_owned(),
        ),
        (
            "volumes",
            format!(r#"}},"spec":{{"containers":[{one}],"volumes":["#),
            r#"{"name":"v%","emptyDir":{}},"#,
            "]}}".to_owned(),
        ),
        (
            "mounts",
            r#"},"spec":{"volumes":[{"name":"v"}],"containers":[{"name":"c","image":"i","volumeMounts":["#.to_owned(),
            r#"{"name":"v","mountPath":"/a%"},"#,
            "]}]}}".to_owned(),
        ),
        (
            "environment",
            r#"},"spec":{"containers":[{"name":"c","image":"i","env":["#.to_owned(),
            r#"{"name":"A%","value":"$(B)"},"#,
            "]}]}}".to_owned(),
        ),
        (
            "ports",
            r#"},"spec":{"containers":[{"name":"c","image":"i","ports":["#.to_owned(),
            r#"{"containerPort":%,"hostPort":1},"#,
            "]}]}}".to_owned(),
        ),
        ("labels", r#","labels":{"#.to_owned(), r#""a%":"b c","#, format!(r#"}}}},"spec":{{"containers":[{one}]}}}}"#)),
        (
            "resources",
            r#"},"spec":{"containers":[{"name":"c","image":"i","resources":{"limits":{"#.to_owned(),
            r#""a%":1,"#,
            "}}}]}}".to_owned(),
        ),
        (
            "tolerations",
            format!(r#"}},"spec":{{"containers":[{one}],"tolerations":["#),
            r#"{"key":"-","effect":"x"},"#,
            "]}}".to_owned(),
        ),
        (
            "host aliases",
            format!(r#"}},"spec":{{"containers":[{one}],"hostAliases":["#),
            r#"{"ip":"x","hostnames":["-"]},"#,
            "]}}".to_owned(),
        ),
    ];
    let mut all = Vec::new();
    for (name, before, item, after) in shapes {
        let mut text = format!(r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"x"{before}"#);
        let each = item.matches([',', '[', '{']).count();
        for number in 0..(VALUES - 100) / each {
            text.push_str(&item.replace('%', &number.to_string()));
        }
        text.pop();
        all.push((name.to_owned(), text + &after));
    }
    all
}

fn manifest(text: &str) -> Result<(), String> {
    let origin = ManifestOrigin {
        source: PodSource::File,
        location: "/pods/x",
        node_name: "node",
        references: ReferenceRule::RefuseAll,
    };
    match manifest_decoder::decode(text.as_bytes()).map_err(|e| e.to_string())? {
        Manifest::Pod(pod) => static_pod::static_pod(*pod, origin).map(drop).map_err(|e| e.to_string()),
        Manifest::List(pods) => Err(format!("{} pods", pods.len())),
    }
}

/// The notices of a valid document count as well.
fn configuration(text: &str) -> Result<(), String> {
    let (_, notices) = berth_config::file_decoder::main_file(text, "/etc", &FeatureGates::new())?;
    Err(format!("read; {notices:?}"))
}

/// CPU time of this thread.
fn used() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("the clock is there").into()
}

fn check(documents: Vec<(String, String)>, read: fn(&str) -> Result<(), String>) {
    for (name, text) in documents {
        assert!(text.len() <= SIZE, "{name}");
        let before = used();
        let words = read(&text).err().unwrap_or_default();
        let taken = used().saturating_sub(before);
        println!("{taken:>10.2?} {name}: {}", words.chars().take(120).collect::<String>());
        assert!(taken < LIMIT, "{name}: {taken:?}");
        assert!(words.len() < WORDS, "{name}: {} bytes of words", words.len());
    }
}

#[test]
fn manifests_in_flow_style() {
    check(flows(&POD, "spec"), manifest);
}

#[test]
fn manifests_in_block_style() {
    check(blocks(&POD, "spec"), manifest);
}

#[test]
fn pods_with_as_many_parts_as_may_be() {
    check(long_pods(), manifest);
}

#[test]
fn configurations_in_flow_style() {
    check(flows(&CONFIGURATION, "featureGates"), configuration);
}

#[test]
fn configurations_in_block_style() {
    check(blocks(&CONFIGURATION, "unknown"), configuration);
}

#[test]
fn configurations_with_as_many_unknown_fields_as_may_be() {
    let fields = (0..VALUES - 100).map(|i| format!(",\"maxPod{i}\":1")).collect::<String>();
    let text = format!("{{{}{fields}}}", CONFIGURATION.json);
    let doubled = fields.replace(",", ",\"port\":1,");
    let half = doubled.get(..doubled.len() / 2).and_then(|half| half.rsplit_once(',')).expect("commas").0;
    let twice = format!("{{{}{half}}}", CONFIGURATION.json);
    check(vec![("unknown".to_owned(), text), ("unknown and twice".to_owned(), twice)], configuration);
}
