//! Checks references to `docs/spec`: document, section, and acceptance case exist.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use regex_lite::Regex;

/// Root directory of the workspace.
const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Directories that are searched for references.
const PLACES: &[&str] = &["src", "crates", "tests", "benches", "docs"];

/// Sections and acceptance cases of one document.
#[derive(Default)]
struct Document {
    sections: BTreeSet<String>,
    cases: BTreeSet<String>,
}

fn files(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            files(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "md") {
            out.push(path);
        }
    }
}

/// Documents by number: `04b`.
fn documents() -> BTreeMap<String, Document> {
    let heading = Regex::new(r"(?m)^#{1,6}\s+(?:Part )?(\d+[a-z]?(?:\.\d+[a-z]?)*|[IVA-C]+)\.?\s").expect("a pattern");
    let second = Regex::new(r"(?m)^#{2,6}.*\band (\d+\.\d+)\b").expect("a pattern");
    let case = Regex::new(r"(?m)^\|\s*\**(AC-\d\d[a-z]?-[A-Z]?\d+[a-z]?)\**\s*\|").expect("a pattern");
    let mut all = BTreeMap::new();
    let mut paths = Vec::new();
    files(&Path::new(ROOT).join("docs/spec"), &mut paths);
    for path in paths {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let Some((number, _)) = name.split_once('-') else { continue };
        let text = fs::read_to_string(&path).expect("text");
        let found = |pattern: &Regex| pattern.captures_iter(&text).map(|c| c[1].to_owned()).collect::<BTreeSet<_>>();
        let sections = found(&heading).union(&found(&second)).cloned().collect();
        all.insert(number.to_owned(), Document { sections, cases: found(&case) });
    }
    all
}

/// References in a text without a target.
fn broken(text: &str, documents: &BTreeMap<String, Document>) -> Vec<String> {
    let reference = Regex::new(r"\b[Ss]pec (\d\d[a-z]?)\b(?: §(\d+[a-z]?(?:\.\d+[a-z]?)*))?").expect("a pattern");
    let case = Regex::new(r"\bAC-(\d\d[a-z]?)-[A-Z]?\d+[a-z]?\b").expect("a pattern");
    let of_sections = reference.captures_iter(text).filter(|c| {
        let Some(document) = documents.get(&c[1]) else { return true };
        c.get(2).is_some_and(|section| !document.sections.contains(section.as_str()))
    });
    let of_cases = case.captures_iter(text).filter(|c| !documents.get(&c[1]).is_some_and(|d| d.cases.contains(&c[0])));
    of_sections.chain(of_cases).map(|c| c[0].to_owned()).collect()
}

#[test]
fn references_to_the_specifications_lead_somewhere() {
    let documents = documents();
    assert!(documents.len() > 15, "only {} documents", documents.len());
    let mut paths = Vec::new();
    PLACES.iter().for_each(|place| files(&Path::new(ROOT).join(place), &mut paths));
    let mut wrong = Vec::new();
    for path in paths.iter().filter(|path| !path.ends_with(file!())) {
        let text = fs::read_to_string(path).expect("text");
        wrong.extend(broken(&text, &documents).into_iter().map(|what| format!("{}: {what}", path.display())));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Source files that a document names, `berth-sys/backoff.rs` or `node/lease_controller.rs`, and that do not exist.
fn missing_files(text: &str, sources: &[String]) -> Vec<String> {
    let path = Regex::new(r"`((?:(berth-[a-z]+)/)?([a-z0-9_./-]+\.rs))`").expect("a pattern");
    let exists = |crate_name: Option<&str>, rest: &str| {
        let within = crate_name.map(|name| format!("/crates/{name}/"));
        let is_it = |source: &&String| source.ends_with(&format!("/{rest}"));
        sources.iter().filter(is_it).any(|source| within.as_ref().is_none_or(|within| source.starts_with(within)))
    };
    let named = path.captures_iter(text).filter(|c| !exists(c.get(2).map(|c| c.as_str()), &c[3]));
    named.map(|c| c[1].to_owned()).collect()
}

#[test]
fn source_files_that_documents_name_exist() {
    let root = Path::new(ROOT);
    let (mut paths, mut documents) = (Vec::new(), vec![root.join("README.md"), root.join("CONTRIBUTING.md")]);
    PLACES.iter().chain([&"examples"]).for_each(|place| files(&root.join(place), &mut paths));
    documents.extend(paths.iter().filter(|p| p.extension().is_some_and(|e| e == "md")).cloned());
    documents.retain(|document| !document.starts_with(root.join("docs/spec")));
    let below = |path: &PathBuf| format!("/{}", path.strip_prefix(root).expect("below it").display());
    let sources: Vec<String> = paths.iter().map(below).collect();
    let mut wrong = Vec::new();
    for document in documents {
        let text = fs::read_to_string(&document).expect("text");
        wrong.extend(missing_files(&text, &sources).into_iter().map(|what| format!("{}: {what}", document.display())));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn missing_files_are_found() {
    let sources = ["/src/node/lease.rs", "/crates/berth-sys/src/backoff.rs"].map(str::to_owned);
    let text = "`node/lease.rs` `lease.rs` `berth-sys/backoff.rs` `berth-api/backoff.rs` `node/leases.rs` node/none.rs";
    assert_eq!(missing_files(text, &sources), ["berth-api/backoff.rs", "node/leases.rs"]);
}

#[test]
fn broken_references_are_found() {
    let mut documents = BTreeMap::new();
    let of = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    documents.insert("04b".to_owned(), Document { sections: of(&["2.1"]), cases: of(&["AC-04b-S8"]) });
    assert_eq!(broken("spec 04b §2.1 and AC-04b-S8, spec 04b", &documents), Vec::<String>::new());
    let text = "Spec 04b §2.2, spec 11, AC-04b-S9, AC-11-1";
    assert_eq!(broken(text, &documents), ["Spec 04b §2.2", "spec 11", "AC-04b-S9", "AC-11-1"]);
}

/// Test names in a text that selects tests: parts of `test(/…/)`, and names behind `--test PROGRAM` or in the list `VM`.
fn selected_tests(text: &str) -> BTreeSet<String> {
    let patterns = [r"test\(/([^)]*)/\)", r"--test \w+ ([a-z]\w+)", r"(?m)^VM = (.*)$"];
    let selected = patterns.iter().flat_map(|pattern| {
        let pattern = Regex::new(pattern).expect("a pattern");
        pattern.captures_iter(text).map(|found| found[1].to_owned()).collect::<Vec<_>>()
    });
    let parts = selected.flat_map(|one| one.split(['|', ' ']).map(str::to_owned).collect::<Vec<_>>());
    let names =
        parts.flat_map(|part| part.split("::").map(|name| name.trim_matches('^').to_owned()).collect::<Vec<_>>());
    names.filter(|name| !name.is_empty()).collect()
}

/// A selection that matches nothing runs nothing, and nobody notices.
#[test]
fn selected_tests_exist() {
    let root = Path::new(ROOT);
    let mut paths = Vec::new();
    files(&root.join("tests"), &mut paths);
    let names: BTreeSet<String> = paths
        .iter()
        .filter(|path| !path.ends_with("citations.rs"))
        .flat_map(|path| {
            let text = fs::read_to_string(path).expect("text");
            let words = text.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned).collect::<Vec<_>>();
            words.into_iter().chain([path.file_stem().expect("a name").to_string_lossy().into_owned()])
        })
        .collect();
    let mut all = BTreeSet::new();
    for file in [".config/nextest.toml", "tests/run.sh", "Makefile"] {
        all.extend(selected_tests(&fs::read_to_string(root.join(file)).expect(file)));
    }
    assert!(all.len() > 10, "{all:?}");
    let missing: Vec<&String> =
        all.iter().filter(|name| !names.iter().any(|known| known.contains(name.as_str()))).collect();
    assert!(missing.is_empty(), "selected, but no test has this in its name: {missing:?}");
}

#[test]
fn selections_are_read() {
    let text = "VM = a::b c::d\n\tcargo test --test it e_f -- --x\nfilter = \"binary(n) & test(/^g::|h_i/)\"\n";
    assert_eq!(selected_tests(text).into_iter().collect::<Vec<_>>(), ["a", "b", "c", "d", "e_f", "g", "h_i"]);
}
