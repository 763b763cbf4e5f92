//! Language rules: words of names, messages, and comments; names of types; doc comments (CONTRIBUTING.md, "Language").

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use proc_macro2::{Delimiter, Group, Literal, TokenStream, TokenTree};

use super::tidy;

/// Words that hide the term a reader would search for: notify, report, publish, log, return; reconcile, restore,
/// terminate; another client, no client, again.
const BANNED: &[&str] = &[
    "anew",
    "anybody",
    "buried",
    "buries",
    "bury",
    "fate",
    "fates",
    "hear",
    "heard",
    "hears",
    "heed",
    "heeds",
    "keeper",
    "keepers",
    "mend",
    "mended",
    "mends",
    "nobody",
    "overheard",
    "overhearing",
    "poke",
    "pokes",
    "revive",
    "revived",
    "said",
    "say",
    "says",
    "somebody",
    "tell",
    "telling",
    "tells",
    "told",
    "whoever",
    "wish",
    "wished",
    "wishes",
];

/// Words that prose may need ("the lock is held", "looks up") and that say nothing as part of a name.
const BANNED_IN_NAMES: &[&str] =
    &["bell", "door", "doors", "ground", "hands", "held", "hurry", "look", "looked", "looks", "pulse", "pulses"];

/// Texts with such words that are not ours: upstream's, or data. File, text.
const FOREIGN: &[(&str, &str)] = &[
    ("crates/berth-runtime/src/images/builtin.rs", "nobody:x:65534"),
    ("crates/berth-metrics/src/engine.rs", "The number of pods this node is told to run."),
];

/// Irregular participles; the regular ones end in `ed`.
const PARTICIPLES: &[&str] = &[
    "Asked", "Begun", "Born", "Bound", "Broken", "Brought", "Built", "Chosen", "Cut", "Done", "Drawn", "Found",
    "Given", "Gone", "Held", "Kept", "Known", "Left", "Lost", "Made", "Met", "Put", "Said", "Seen", "Sent", "Shown",
    "Taken", "Told", "Written",
];

/// Types named by a single participle, and why.
const PARTICIPLE_TYPES: &[(&str, &str)] = &[
    ("Embedded", "the embedded runtime, whose name it is"),
    ("Unified", "the unified hierarchy, the kernel's name of cgroup v2"),
];

/// Type names in more than three modules, and why.
const COMMON_TYPES: &[(&str, &str)] = &[];

/// How often a type name may be defined.
const MODULES_PER_TYPE: usize = 3;

/// A defined name: its line, the keyword that defines it (`field` for fields and parameters), and the name.
struct Definition {
    line: usize,
    kind: String,
    name: String,
}

/// Definitions, string literals, and doc comments of a file.
#[derive(Default)]
struct Contents {
    definitions: Vec<Definition>,
    texts: Vec<(usize, String)>,
    /// Line, text, and the name of the documented item.
    docs: Vec<(usize, String, Option<String>)>,
}

impl Contents {
    fn of(text: &str) -> Self {
        let mut contents = Self::default();
        contents.walk(text.parse().expect("a file of Rust"));
        contents
    }

    fn walk(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            let next = |by: usize| tokens.get(at + by);
            match token {
                TokenTree::Ident(word) => {
                    let is_mut = |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Ident(i)) if i == "mut");
                    let name = if is_mut(next(1)) { next(2) } else { next(1) };
                    let keyword = word.to_string();
                    let is_definition = matches!(
                        keyword.as_str(),
                        "struct" | "enum" | "trait" | "union" | "type" | "fn" | "mod" | "const" | "static" | "let"
                    );
                    if let Some(TokenTree::Ident(name)) = name.filter(|_| is_definition) {
                        self.define(name, &keyword);
                    }
                    let (colon, after) = (next(1), next(2));
                    let is_colon =
                        |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(p)) if p.as_char() == ':');
                    let is_path = at.checked_sub(1).is_some_and(|before| is_colon(tokens.get(before)));
                    if is_colon(colon) && !is_colon(after) && !is_path {
                        self.define(word, "field");
                    }
                }
                TokenTree::Literal(literal) => self.text(literal),
                TokenTree::Group(group) => match doc(&tokens, at, group) {
                    Some(text) => {
                        let item = documented(&tokens[at + 1..]);
                        self.docs.push((group.span_open().start().line, text, item));
                    }
                    None => self.walk(group.stream()),
                },
                TokenTree::Punct(_) => {}
            }
        }
    }

    fn define(&mut self, name: &proc_macro2::Ident, kind: &str) {
        let line = name.span().start().line;
        self.definitions.push(Definition { line, kind: kind.to_owned(), name: name.to_string() });
    }

    fn text(&mut self, literal: &Literal) {
        let text = literal.to_string();
        if text.starts_with('"') || text.starts_with("r\"") || text.starts_with("r#") {
            self.texts.push((literal.span().start().line, text));
        }
    }
}

/// Text of a doc comment, which is an attribute `#[doc = "…"]` here.
fn doc(tokens: &[TokenTree], at: usize, group: &Group) -> Option<String> {
    let is_attribute = group.delimiter() == Delimiter::Bracket
        && at
            .checked_sub(1)
            .is_some_and(|before| matches!(&tokens[before], TokenTree::Punct(p) if "#!".contains(p.as_char())));
    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
    match inner.as_slice() {
        [TokenTree::Ident(name), TokenTree::Punct(_), TokenTree::Literal(text)] if is_attribute && name == "doc" => {
            Some(text.to_string().trim_matches('"').trim().to_owned())
        }
        _ => None,
    }
}

/// Name of the item, field, or variant behind a doc comment; `None` if another line of comment follows.
fn documented(tokens: &[TokenTree]) -> Option<String> {
    let mut tokens = tokens.iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(p) if p.as_char() == '#' => {
                let Some(TokenTree::Group(group)) = tokens.next() else { return None };
                if group.stream().to_string().starts_with("doc ") {
                    return None;
                }
            }
            TokenTree::Ident(word) => match word.to_string().as_str() {
                "pub" => drop(tokens.next_if(|token| matches!(token, TokenTree::Group(_)))),
                "async" | "unsafe" | "fn" | "struct" | "enum" | "trait" | "type" | "mod" | "static" | "const"
                | "use" => {}
                name => return Some(name.to_owned()),
            },
            _ => return None,
        }
    }
    None
}

/// Words of a name, in lower case: `snake_case` and `CamelCase`.
fn words_of_name(name: &str) -> Vec<String> {
    let mut words = Vec::new();
    for part in name.split('_') {
        let mut word = String::new();
        let mut was_lower = false;
        for c in part.chars() {
            if c.is_uppercase() && was_lower {
                words.push(std::mem::take(&mut word));
            }
            was_lower = c.is_lowercase() || c.is_ascii_digit();
            word.extend(c.to_lowercase());
        }
        words.push(word);
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Words of a sentence, in lower case, without code in backticks.
fn words_of_text(text: &str) -> impl Iterator<Item = String> {
    let prose: Vec<&str> = text.split('`').step_by(2).collect();
    let words = prose.join(" ").to_lowercase();
    let words: Vec<String> = words.split(|c: char| !c.is_alphanumeric()).map(str::to_owned).collect();
    words.into_iter().filter(|word| !word.is_empty())
}

/// All Rust files of the repository, by path below its root.
fn files() -> Vec<(String, String)> {
    fn walk(folder: &Path, out: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() && !path.ends_with("target") {
                walk(&path, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                out.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths = Vec::new();
    for folder in ["src", "crates", "tests", "benches", "examples", "fuzz"] {
        walk(&root.join(folder), &mut paths);
    }
    paths.sort();
    let name = |path: &Path| path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
    // The word lists of this file are about words, not made of them.
    let own = |name: &String| name == "tests/it/language.rs";
    let named = paths.iter().map(|path| (name(path), fs::read_to_string(path).expect("text")));
    named.filter(|(name, _)| !own(name)).collect()
}

fn assert_none(wrong: &[String], advice: &str) {
    assert!(wrong.is_empty(), "{} places: {advice}\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn names_use_the_words_of_the_field() {
    let is_banned = |word: &String| BANNED.contains(&word.as_str()) || BANNED_IN_NAMES.contains(&word.as_str());
    let mut wrong = Vec::new();
    for (file, text) in files() {
        let stem = Path::new(&file).file_stem().expect("a name").to_string_lossy();
        if words_of_name(&stem).iter().any(is_banned) {
            wrong.push(file.clone());
        }
        for Definition { line, kind, name } in Contents::of(&text).definitions {
            if words_of_name(&name).iter().any(is_banned) {
                wrong.push(format!("{file}:{line}: {kind} {name}"));
            }
        }
    }
    assert_none(&wrong, "name what it is or does in the field's words");
}

#[test]
fn messages_use_the_words_of_the_field() {
    let mut wrong = Vec::new();
    for (file, code) in tidy::shipped() {
        for (line, text) in Contents::of(&code).texts {
            let is_foreign = FOREIGN.iter().any(|(place, words)| *place == file && text.contains(words));
            if !is_foreign && words_of_text(&text).any(|word| BANNED.contains(&word.as_str())) {
                wrong.push(format!("{file}:{line}: {text}"));
            }
        }
    }
    assert_none(&wrong, "write for somebody who has never seen the code, as kubectl and kubelet do");
}

#[test]
fn comments_use_the_words_of_the_field() {
    let mut wrong = Vec::new();
    for (file, text) in files() {
        for (at, line) in text.lines().enumerate() {
            let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
            if words_of_text(comment).any(|word| BANNED.contains(&word.as_str())) {
                wrong.push(format!("{file}:{}: {}", at + 1, line.trim()));
            }
        }
    }
    assert_none(&wrong, "subject, verb, object, in the field's words");
}

#[test]
fn types_are_nouns() {
    let mut wrong = Vec::new();
    let mut listed: BTreeSet<&str> = PARTICIPLE_TYPES.iter().map(|(name, _)| *name).collect();
    for (file, code) in tidy::shipped() {
        for Definition { line, kind, name } in Contents::of(&code).definitions {
            let is_type = matches!(kind.as_str(), "struct" | "enum" | "trait" | "union");
            let is_participle = PARTICIPLES.contains(&name.as_str())
                || (name.ends_with("ed") && words_of_name(&name).len() == 1 && name != "Feed");
            if is_type && is_participle && !PARTICIPLE_TYPES.iter().any(|(known, _)| *known == name) {
                wrong.push(format!("{file}:{line}: {kind} {name}"));
            }
            listed.remove(name.as_str());
        }
    }
    wrong.extend(listed.iter().map(|name| format!("{name} is listed and does not exist")));
    assert_none(&wrong, "a type is a noun that a stranger can guess");
}

#[test]
fn type_names_are_specific() {
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (file, code) in tidy::shipped() {
        for Definition { kind, name, .. } in Contents::of(&code).definitions {
            if matches!(kind.as_str(), "struct" | "enum" | "trait" | "union") {
                modules.entry(name).or_default().insert(file.clone());
            }
        }
    }
    let listed: BTreeSet<&str> = COMMON_TYPES.iter().map(|(name, _)| *name).collect();
    let mut wrong = Vec::new();
    for (name, files) in &modules {
        if files.len() > MODULES_PER_TYPE && !listed.contains(name.as_str()) {
            wrong.push(format!("{name}: {}", files.iter().cloned().collect::<Vec<_>>().join(", ")));
        }
    }
    let is_common = |name: &&&str| modules.get(**name).is_some_and(|files| files.len() > MODULES_PER_TYPE);
    wrong.extend(listed.iter().filter(|name| !is_common(name)).map(|name| format!("{name} is listed and not common")));
    assert_none(&wrong, "give each the noun that it is the kind, state, or entry of");
}

#[test]
fn doc_comments_say_more_than_the_name() {
    const FILLING: &[&str] =
        &["a", "an", "and", "are", "by", "for", "in", "is", "it", "its", "of", "that", "the", "this", "to"];
    let singular = |word: &String| word.strip_suffix('s').filter(|stem| stem.len() > 2).unwrap_or(word).to_owned();
    let mut wrong = Vec::new();
    for (file, code) in tidy::shipped() {
        let contents = Contents::of(&code);
        for (at, (line, text, item)) in contents.docs.iter().enumerate() {
            // The last line of a longer comment says nothing alone.
            let is_alone = at.checked_sub(1).is_none_or(|before| contents.docs[before].0 + 1 < *line);
            let (Some(item), true, false) = (item, is_alone, text.starts_with('`')) else { continue };
            let name: BTreeSet<String> = words_of_name(item).iter().map(singular).collect();
            let mut words = words_of_text(text).filter(|word| !FILLING.contains(&word.as_str())).peekable();
            if words.peek().is_some() && words.all(|word| name.contains(&singular(&word))) {
                wrong.push(format!("{file}:{line}: {text} ({item})"));
            }
        }
    }
    assert_none(&wrong, "say the unit, range, default, error, or source, or leave it out");
}

#[test]
fn the_reader_of_names_reads() {
    assert_eq!(words_of_name("PodHTTPDoor2_x"), ["pod", "httpdoor2", "x"]);
    let text =
        "/// Its size.\npub struct Size { /** far */ pub told: u8 }\nfn f(a: b::C) { let mut held = \"nobody\"; }";
    let contents = Contents::of(text);
    let names: Vec<&str> = contents.definitions.iter().map(|definition| definition.name.as_str()).collect();
    assert_eq!(names, ["Size", "told", "f", "a", "held"]);
    assert_eq!(contents.texts[0].1, "\"nobody\"");
    assert_eq!((contents.docs[0].1.as_str(), contents.docs[0].2.as_deref()), ("Its size.", Some("Size")));
}
