//! Source code rules: allowed dependencies, `unsafe`, purity, file length, banned words, licenses.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use spdx::{Expression, Licensee, ParseMode};

/// Lines of a file, tests not counted, above which it is too long.
const LONG: usize = 500;

/// Files that may be longer: path, number of lines, and reason.
const LONG_FILES: &[(&str, usize, &str)] = &[
    (
        "crates/berth-config/src/fields.rs",
        700,
        "a data table: every field of the configuration, in the reference's order",
    ),
    ("crates/berth-config/src/flags/table.rs", 600, "a data table: every flag with its help, in the reference's order"),
];

/// Root directory of the workspace.
const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Shipped sources: the root package and the crates below it, without test-only crates.
fn sources() -> Vec<(PathBuf, String)> {
    fn walk(folder: &Path, out: &mut Vec<(PathBuf, String)>) {
        let mut entries: Vec<PathBuf> =
            fs::read_dir(folder).expect("a folder").map(|e| e.expect("an entry").path()).collect();
        entries.sort();
        for path in entries {
            if path.is_dir() {
                walk(&path, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).expect("text");
                out.push((path, text));
            }
        }
    }
    let mut out = Vec::new();
    walk(&Path::new(ROOT).join("src"), &mut out);
    let crates = fs::read_dir(Path::new(ROOT).join("crates")).expect("the crates");
    let mut crates: Vec<PathBuf> = crates.map(|entry| entry.expect("an entry").path()).collect();
    crates.sort();
    for folder in crates.iter().filter(|folder| !folder.ends_with("berth-testkit")) {
        walk(&folder.join("src"), &mut out);
    }
    out
}

/// Path of a source file relative to the root of the workspace.
fn relative(path: &Path) -> &Path {
    path.strip_prefix(ROOT).expect("below the root")
}

/// Module of a file in the root package: the directory below `src/`, or the file's own name. `None` in other crates.
fn module(path: &Path) -> Option<String> {
    let below = relative(path).strip_prefix("src").ok()?;
    let first = below.components().next().expect("a name").as_os_str().to_string_lossy().into_owned();
    Some(first.trim_end_matches(".rs").to_owned())
}

/// The table of docs/architecture.md: module → modules and crates it may import.
fn allowed() -> BTreeMap<String, Vec<String>> {
    let text = fs::read_to_string(Path::new(ROOT).join("docs/architecture.md")).expect("readable");
    let table = text.split("## Allowed dependencies").nth(1).expect("the section").split("\n## ").next().expect("text");
    let mut out = BTreeMap::new();
    for row in table.lines().filter(|line| line.starts_with("| ") && !line.contains("Module")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, modules, may] = cells.as_slice() else { panic!("three columns: {row}") };
        for module in modules.split(',') {
            let list = may.split(',').map(|m| m.trim().trim_matches('`').replace('-', "_")).collect();
            out.insert(module.trim().to_owned(), list);
        }
    }
    out
}

/// Paths after `crate::` in a file, including nested `use` lists, up to two segments, and crates of the workspace.
fn imports(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    for (at, _) in text.match_indices("berth_") {
        let name = head(&text[at..]);
        let name = name.split("::").next().expect("a first part");
        if text[at + name.len()..].starts_with("::") && !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
        {
            out.push(name.to_owned());
        }
    }
    for (at, _) in text.match_indices("crate::") {
        if text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &text[at + "crate::".len()..];
        if rest.starts_with('{') {
            out.extend(top_level_of_list(rest));
        } else {
            out.push(head(rest));
        }
    }
    out
}

fn head(text: &str) -> String {
    let name = |t: &str| t.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let first = name(text);
    match text[first.len()..].strip_prefix("::") {
        Some(rest) if !name(rest).is_empty() => format!("{first}::{}", name(rest)),
        Some(rest) if rest.starts_with('{') => {
            let inner = top_level_of_list(rest);
            format!("{first}::{}", inner.first().map_or("", |i| i.split("::").next().unwrap_or_default()))
        }
        _ => first,
    }
}

fn top_level_of_list(text: &str) -> Vec<String> {
    let mut depth = 0_u32;
    let mut out = Vec::new();
    let mut item = String::new();
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if (c == ',' && depth == 1) || depth == 0 {
            out.push(head(item.trim()));
            item.clear();
        } else if depth > 1 || (c != '{') {
            item.push(c);
        }
        if depth == 0 {
            break;
        }
    }
    out.retain(|i| !i.is_empty());
    out
}

#[test]
fn modules_import_downwards_only() {
    let allowed = allowed();
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let Some(module) = module(&path).filter(|module| !["bin", "lib", "main"].contains(&module.as_str())) else {
            continue;
        };
        let may = allowed.get(&module).unwrap_or_else(|| panic!("module {module} is not in the table"));
        for import in imports(&text) {
            let target = import.split("::").next().unwrap_or_default();
            let fine = target == module || may.iter().any(|m| m == "all" || m == target);
            if !fine {
                wrong.push(format!("{}: {module} may not import {import}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unsafe_stands_in_sys_only() {
    for (path, text) in sources() {
        let uses = text.contains("unsafe {") || text.contains("unsafe fn") || text.contains("allow(unsafe_code");
        let is_sys = relative(&path).starts_with("crates/berth-sys");
        assert!(!uses || is_sys, "{} uses unsafe", path.display());
        if is_sys {
            let (blocks, proofs) = (text.matches("unsafe {").count(), text.matches("SAFETY:").count());
            assert!(proofs >= blocks, "{}: {blocks} unsafe blocks, {proofs} proofs", path.display());
        }
    }
}

#[test]
fn pure_files_are_pure() {
    for (path, text) in sources() {
        let header: String = text.lines().take_while(|line| line.starts_with("//!")).collect();
        if !header.contains("Pure.") {
            continue;
        }
        let code = text.split("#[cfg(test)]").next().expect("text");
        for word in
            ["tokio::", "std::fs", "tracing::", "prometheus::", "berth_metrics::", "SystemTime::now", "Timestamp::now"]
        {
            assert!(!code.contains(word), "{} calls itself pure and mentions {word}", path.display());
        }
    }
}

#[test]
fn every_file_has_a_header() {
    for (path, text) in sources() {
        assert!(text.starts_with("//!"), "{} has no header", path.display());
    }
}

/// Files compiled for tests only: `#[cfg(test)] mod name;`, also where tests of other crates use them.
fn test_files(all: &[(PathBuf, String)]) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for (path, text) in all {
        let stem = path.file_stem().expect("a name").to_string_lossy();
        let folder = path.parent().expect("below the root");
        let folder = match &*stem {
            "mod" | "lib" | "main" => folder.to_owned(),
            stem => folder.join(stem),
        };
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let is_for_tests = |line: &str| line == "#[cfg(test)]" || line.starts_with("#[cfg(any(test, ");
        for pair in lines.windows(2).filter(|pair| is_for_tests(pair[0])) {
            if let Some((_, name)) = pair[1].strip_suffix(';').and_then(|line| line.split_once("mod ")) {
                found.extend([folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")]);
            }
        }
    }
    found
}

/// Shipped code of each file, by its path below the root; tests are left out.
pub(super) fn shipped() -> Vec<(String, String)> {
    let all = sources();
    let tests = test_files(&all);
    let name = |path: &Path| relative(path).to_string_lossy().into_owned();
    all.iter().filter(|(path, _)| !tests.contains(path)).map(|(path, text)| (name(path), code(text))).collect()
}

/// A file without its tests, with unchanged line numbers: a test module ends the file, the declaration of one does not.
fn code(text: &str) -> String {
    let (mut code, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("#[cfg(test)]\nmod ") {
        code += before;
        match after.find(['{', ';']) {
            Some(end) if after[end..].starts_with(';') => {
                code.push('\n');
                rest = &after[end + 1..];
            }
            _ => return code,
        }
    }
    code + rest
}

#[test]
fn tests_do_not_ship() {
    let text = "a\n#[cfg(test)]\nmod far;\nb\n#[cfg(test)]\nmod tests {\nc\n}\n";
    assert_eq!(code(text), "a\n\n\nb\n");
    assert_eq!(code("a\n"), "a\n");
}

/// Lines of code without comments, with line numbers from 1.
fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
    lines.filter(|(_, line)| !line.trim_start().starts_with("//"))
}

#[test]
fn files_are_read_in_one_sitting() {
    let mut listed: BTreeMap<&str, usize> = LONG_FILES.iter().map(|(name, most, _)| (*name, *most)).collect();
    let mut wrong = Vec::new();
    for (name, code) in shipped() {
        let (lines, most) = (code.lines().count(), listed.remove(name.as_str()));
        match most {
            Some(_) if lines <= LONG => wrong.push(format!("{name} is short enough now: take it off the list")),
            most if lines > most.unwrap_or(LONG) => wrong.push(format!(
                "{name} has {lines} lines without its tests: split it by its ideas, or list it with a reason"
            )),
            _ => {}
        }
    }
    wrong.extend(listed.keys().map(|name| format!("{name} is listed and does not exist")));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn nothing_ships_that_panics_without_a_reason() {
    let mut wrong = Vec::new();
    for (name, code) in shipped() {
        for (number, line) in code_lines(&code) {
            for word in [".unwrap()", ".unwrap_err()", ".expect(\"\")", ".expect_err("] {
                if line.contains(word) {
                    wrong.push(format!("{name}:{number}: {word}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "say by expect which invariant holds, or return an error:\n{}", wrong.join("\n"));
}

#[test]
fn nothing_is_left_to_do() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        for (number, line) in code_lines(&text) {
            if ["todo!(", "unimplemented!(", "dbg!("].iter().any(|word| line.contains(word)) {
                wrong.push(format!("{}:{number}: {}", path.display(), line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Output of `cargo metadata`, without network access; `None` if there is no cargo.
fn metadata() -> Option<serde_json::Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let environment = if cfg!(target_env = "musl") { "musl" } else { "gnu" };
    let ours = format!("{}-unknown-linux-{environment}", std::env::consts::ARCH);
    let mut complaint = String::new();
    // Crates of other platforms may not have been downloaded here.
    for platform in [&[][..], &["--filter-platform", &ours]] {
        let mut command = Command::new(&cargo);
        command.args(["metadata", "--format-version", "1", "--offline", "--locked"]).args(platform);
        match command.current_dir(ROOT).output() {
            Ok(output) if output.status.success() => return serde_json::from_slice(&output.stdout).ok(),
            Ok(output) => complaint = String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return None,
            Err(e) => complaint = e.to_string(),
        }
    }
    panic!("cargo metadata: {complaint}")
}

#[test]
fn licenses_are_on_the_list() {
    let Some(metadata) = metadata() else {
        println!("skipped licenses_are_on_the_list: there is no cargo here");
        return;
    };
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 100, "only {} packages", packages.len());
    let permitted = permitted_licenses();
    let text = |package: &serde_json::Value, field: &str| package[field].as_str().unwrap_or_default().to_owned();
    let wrong: Vec<String> = packages
        .iter()
        .filter(|package| !is_licensed(&text(package, "license"), &permitted))
        .map(|p| format!("{} {}: {:?}", text(p, "name"), text(p, "version"), text(p, "license")))
        .collect();
    assert!(wrong.is_empty(), "licenses that are not on the list:\n{}", wrong.join("\n"));
}

#[test]
fn dependencies_come_from_listed_registries() {
    let Some(metadata) = metadata() else {
        println!("skipped dependencies_come_from_listed_registries: there is no cargo here");
        return;
    };
    let registries: Vec<String> =
        deny_list("sources", "allow-registry").iter().map(|url| format!("registry+{url}")).collect();
    let packages = metadata["packages"].as_array().expect("packages");
    // Crates of the workspace have no source.
    let sources = packages.iter().filter_map(|package| package["source"].as_str());
    let wrong: BTreeSet<&str> = sources.filter(|source| !registries.iter().any(|listed| listed == source)).collect();
    assert!(wrong.is_empty(), "sources that are not on the list: {wrong:?}");
}

/// A list of `deny.toml`, the rules of cargo-deny.
fn deny_list(table: &str, key: &str) -> Vec<String> {
    let text = fs::read_to_string(Path::new(ROOT).join("deny.toml")).expect("deny.toml");
    let rules: toml::Table = text.parse().expect("TOML");
    let list = rules[table][key].as_array().expect("a list");
    list.iter().map(|item| item.as_str().expect("a text").to_owned()).collect()
}

fn permitted_licenses() -> Vec<Licensee> {
    deny_list("licenses", "allow").iter().map(|name| Licensee::parse(name).expect("an SPDX identifier")).collect()
}

/// Whether the permitted licenses satisfy an SPDX expression, by cargo-deny's rules: `/` is the deprecated form of `OR`.
fn is_licensed(expression: &str, permitted: &[Licensee]) -> bool {
    let expression = Expression::parse_mode(expression, ParseMode::LAX);
    expression.is_ok_and(|e| e.evaluate(|required| permitted.iter().any(|license| license.satisfies(required))))
}

#[test]
fn the_reader_of_licenses_reads() {
    let permitted = permitted_licenses();
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("MIT OR GPL-3.0-only", true),
        ("MIT AND GPL-3.0-only", false),
        ("GPL-3.0-only OR MIT AND ISC", true),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
        ("(MIT OR Apache-2.0) AND OpenSSL", false),
        ("Apache-2.0 WITH LLVM-exception OR GPL-2.0-only", true),
        ("Apache-2.0 WITH other-exception", false),
        ("MIT/Apache-2.0", true),
        ("", false),
        ("(MIT", false),
    ] {
        assert_eq!(is_licensed(expression, &permitted), expected, "{expression}");
    }
}

#[test]
fn the_reader_of_imports_reads() {
    let text = "use crate::{pleg::{A, B}, engine::grace::X, logs};\nfn f() { crate::node::a(berth_sys::b()); }";
    assert_eq!(imports(text), ["berth_sys", "pleg::A", "engine::grace", "logs", "node::a"]);
}

/// Fields that only the configuration module reads, or that nothing reads any more.
const READ_WITHIN: &[(&str, &str)] = &[
    ("api_version", "what the document is"),
    ("content_type", "JSON is always used: docs/differences.md names it"),
    ("eviction_minimum_reclaim", "config/eviction.rs"),
    ("eviction_soft", "config/eviction.rs"),
    ("eviction_soft_grace_period", "config/eviction.rs"),
    ("fail_cgroup_v1", "judged at the start"),
    ("fail_swap_on", "judged at the start"),
    ("feature_gates", "the gates"),
    ("hairpin_mode", "the reference reads it no more"),
    ("iptables_drop_bit", "the reference reads it no more"),
    ("iptables_masquerade_bit", "the reference reads it no more"),
    ("kind", "what the document is"),
    ("make_iptables_util_chains", "on by default: docs/differences.md names it"),
    ("merge_default_eviction_settings", "drop-ins"),
    ("run_once", "judged at the start"),
];

#[test]
fn every_setting_does_something_or_is_named() {
    let shipped = shipped();
    let text = |name: &str| shipped.iter().find(|(path, _)| path == name).expect(name).1.clone();
    let outside: String = shipped
        .iter()
        .filter(|(path, _)| !path.starts_with("crates/berth-config/"))
        .map(|(_, text)| text.as_str())
        .collect();
    let name_at = |at: usize| outside[at + 1..].split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next();
    let read: BTreeSet<&str> = outside.match_indices('.').filter_map(|(at, _)| name_at(at)).collect();
    let fields = text("crates/berth-config/src/fields.rs");
    let fields = fields.split("pub struct KubeletConfiguration {").nth(1).and_then(|rest| rest.split("\n}").next());
    let fields =
        fields.expect("the structure").lines().filter_map(|line| line.trim().strip_prefix("pub ")?.split(':').next());
    let effective = text("crates/berth-config/src/unimplemented_settings.rs");
    let is_named = |field: &str| [",", ";", "\n"].iter().any(|end| effective.contains(&format!("\" => {field}{end}")));
    let mut wrong = Vec::new();
    for field in fields {
        let is_read = read.contains(field) || READ_WITHIN.iter().any(|(known, _)| *known == field);
        match (is_read, is_named(field)) {
            (false, false) => wrong.push(format!("{field} is not read: name it in unimplemented_settings.rs")),
            (true, true) => wrong.push(format!("{field} is read: take it out of unimplemented_settings.rs")),
            _ => {}
        }
    }
    let asks = |gate: &str| {
        let asked = format!("enabled(\"{gate}\")");
        let listed = format!("\"{gate}\",");
        shipped
            .iter()
            .any(|(path, text)| text.contains(&asked) || (path == "src/node/facts.rs" && text.contains(&listed)))
    };
    for gate in berth_config::gates::GATES.iter().map(|gate| gate.name) {
        let is_listed = berth_config::CONSULTED.contains(&gate);
        if asks(gate) != is_listed {
            wrong.push(format!("the gate {gate}: asked for {}, listed {is_listed}", asks(gate)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Public functions that only tests call, with the reason why they are not test code.
const FOR_TESTS: &[(&str, &str)] = &[
    ("is_reachable", "tests of outages ask the client itself"),
    ("is_slice", "the scripted systemd of the virtual machines"),
    ("reload_identity", "stands for a notification that was lost"),
    ("unasked", "callers of no listener in particular"),
    ("unauthenticated_listener", "callers of a listener without authentication"),
    ("volatile", "the runtime's bench has no disk"),
    ("with_path", "tests bring programs of their own"),
];

/// A public function without callers is a feature that is not connected.
#[test]
fn public_functions_have_callers() {
    let all = sources();
    let tests = test_files(&all);
    let production = |text: &str| {
        let end = text.rfind("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
        text[..end].to_owned()
    };
    let shipped: Vec<(&PathBuf, String)> =
        all.iter().filter(|(path, _)| !tests.contains(path)).map(|(path, text)| (path, production(text))).collect();
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, text) in &shipped {
        for word in code_lines(text).flat_map(|(_, line)| line.split(|c: char| !is_part(c))) {
            *uses.entry(word).or_default() += 1;
        }
    }
    let mut wrong = Vec::new();
    for (path, text) in &shipped {
        let mut is_of_tests = false;
        for line in text.lines().map(str::trim_start) {
            let function = line.strip_prefix("pub").and_then(|rest| rest.split_once("fn ")).map(|(_, rest)| rest);
            let name = function.and_then(|rest| rest.split(|c: char| !is_part(c)).next());
            if let Some(name) = name.filter(|name| !is_of_tests && uses.get(name) == Some(&1))
                && !FOR_TESTS.iter().any(|(known, _)| *known == name)
            {
                wrong.push(format!("{}: nothing that ships calls {name}", path.display()));
            }
            is_of_tests = line.starts_with("#[cfg(test)]");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
