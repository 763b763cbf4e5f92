//! The house's own rules, read from the sources: who imports whom, where `unsafe` stands, and
//! that what calls itself pure is.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

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
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut out);
    out
}

/// The room of a source file: the folder below `src/`, or the file's own name. The ports are a
/// room of their own: they may name CRI messages, the rest of the engine may not.
fn room(path: &Path) -> String {
    let relative = path.strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).expect("below src");
    if relative.starts_with("engine/ports") {
        return "engine::ports".to_owned();
    }
    let first = relative.components().next().expect("a name").as_os_str().to_string_lossy().into_owned();
    first.trim_end_matches(".rs").to_owned()
}

/// The table of ARCHITECTURE.md: room → rooms it may import.
fn allowed() -> BTreeMap<String, Vec<String>> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("ARCHITECTURE.md")).expect("readable");
    let table = text.split("## Who may import whom").nth(1).expect("the section").split("\n## ").next().expect("text");
    let mut out = BTreeMap::new();
    for row in table.lines().filter(|line| line.starts_with("| ") && !line.contains("Room")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, rooms, may] = cells.as_slice() else { panic!("three columns: {row}") };
        for room in rooms.split(',') {
            let list = may.split(',').map(|m| m.trim().trim_matches('`').to_owned()).collect();
            out.insert(room.trim().to_owned(), list);
        }
    }
    out
}

/// Paths after `crate::` in a file, nested `use` lists included, as far as two segments.
fn imports(text: &str) -> Vec<String> {
    let mut out = Vec::new();
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
fn rooms_import_downwards_only() {
    let allowed = allowed();
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let room = room(&path);
        if ["lib", "main", "proto"].contains(&room.as_str()) {
            continue;
        }
        let may = allowed.get(&room).unwrap_or_else(|| panic!("room {room} is not in the table"));
        for import in imports(&text) {
            let target = import.split("::").next().unwrap_or_default();
            let fine =
                target == room || import == room || may.iter().any(|m| m == "all" || m == target || *m == import);
            if !fine {
                wrong.push(format!("{}: {room} may not import {import}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unsafe_stands_in_sys_only() {
    for (path, text) in sources() {
        let uses = text.contains("unsafe {") || text.contains("unsafe fn") || text.contains("allow(unsafe_code");
        assert!(!uses || room(&path) == "sys", "{} uses unsafe", path.display());
        if room(&path) == "sys" {
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
            ["tokio::", "std::fs", "tracing::", "prometheus::", "crate::metrics", "SystemTime::now", "Timestamp::now"]
        {
            assert!(!code.contains(word), "{} calls itself pure and mentions {word}", path.display());
        }
    }
}

#[test]
fn every_file_says_what_it_is_for() {
    for (path, text) in sources() {
        assert!(text.starts_with("//!"), "{} has no header", path.display());
    }
}

#[test]
fn the_reader_of_imports_reads() {
    let text = "use crate::{pod::{A, B}, engine::ports::X, sys};\nfn f() { crate::metrics::static_label(true); }";
    assert_eq!(imports(text), ["pod::A", "engine::ports", "sys", "metrics::static_label"]);
}
