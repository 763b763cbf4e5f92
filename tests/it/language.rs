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
const BANNED: &str = "anew buried buries bury fate fates hear heard hears heed heeds keeper keepers mend mended mends \
    overheard poke pokes revive revived said say says tell telling tells told wish wished wishes";

/// Words that comments may need ("the lock is held", "nobody reads it"); as part of a name or in a message they hide what
/// is meant.
const BANNED_IN_NAMES: &str =
    "anybody bell door doors ground hands held hurry look looked looks nobody pulse pulses somebody";

/// Words banned in messages only.
const BANNED_IN_MESSAGES: &str = "anybody nobody somebody whoever";

/// Texts with such words that are not ours: upstream's, or data. File, text.
const FOREIGN: &[(&str, &str)] = &[
    // A member of the messages of the control socket.
    ("crates/berth-runtime/src/images/commands.rs", "mended"),
    ("crates/berth-runtime/src/images/builtin.rs", "nobody:x:65534"),
];

/// Irregular participles; the regular ones end in `ed`.
const PARTICIPLES: &str = "Asked Begun Born Bound Broken Brought Built Chosen Cut Done Drawn Found Given Gone Held Kept Known \
    Left Lost Made Met Put Said Seen Sent Shown Taken Told Written";

/// Types named by a single participle, and why.
const PARTICIPLE_TYPES: &[(&str, &str)] = &[];

/// Type names in more than three modules, and why.
const COMMON_TYPES: &[(&str, &str)] = &[];

/// How often a type name may be defined.
const MODULES_PER_TYPE: usize = 3;

/// Words of a doc comment that add nothing.
const FILLING: &str = "a an and are by for in is it its of that the this to";

/// A defined type: its line, its keyword, and its name.
struct Type {
    line: usize,
    keyword: String,
    name: String,
}

/// Identifiers, types, string literals, and doc comments of a file.
#[derive(Default)]
struct Contents {
    identifiers: Vec<(usize, String)>,
    types: Vec<Type>,
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
            match token {
                TokenTree::Ident(word) => {
                    let (line, word) = (word.span().start().line, word.to_string());
                    if let Some(TokenTree::Ident(name)) = tokens.get(at + 1)
                        && matches!(word.as_str(), "struct" | "enum" | "trait" | "union")
                    {
                        self.types.push(Type { line, keyword: word.clone(), name: name.to_string() });
                    }
                    self.identifiers.push((line, word));
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

    /// Doc comments of one line that only repeat the name of their item: line, text, name.
    fn repeated_names(&self) -> impl Iterator<Item = (usize, &str, &str)> {
        let filling = words(FILLING);
        let singular = |word: &str| word.strip_suffix('s').filter(|stem| stem.len() > 2).unwrap_or(word).to_owned();
        self.docs.iter().enumerate().filter_map(move |(at, (line, text, item))| {
            // The last line of a longer comment need not stand alone.
            let is_alone = at.checked_sub(1).is_none_or(|before| self.docs[before].0 + 1 < *line);
            let item = item.as_deref().filter(|_| is_alone && !text.starts_with('`'))?;
            let name: BTreeSet<String> = words_of_name(item).iter().map(|word| singular(word)).collect();
            let words = text.split(|c: char| !c.is_alphanumeric()).map(str::to_lowercase);
            let mut words = words.filter(|word| !word.is_empty() && !filling.contains(word.as_str())).peekable();
            words.peek()?;
            words.all(|word| name.contains(&singular(&word))).then_some((*line, text.as_str(), item))
        })
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

/// The words of a list with blanks between them.
fn words(list: &'static str) -> BTreeSet<&'static str> {
    list.split(' ').collect()
}

/// Whether a sentence has one of the words, outside code in backticks.
fn has_word(text: &str, banned: &BTreeSet<&str>) -> bool {
    let prose = text.split('`').step_by(2);
    let mut words = prose.flat_map(|part| part.split(|c: char| !c.is_alphanumeric()));
    words.any(|word| banned.contains(word) || banned.contains(word.to_ascii_lowercase().as_str()))
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
    let (banned, in_names) = (words(BANNED), words(BANNED_IN_NAMES));
    let is_banned = |word: &String| banned.contains(word.as_str()) || in_names.contains(word.as_str());
    let mut wrong = Vec::new();
    for (file, text) in files() {
        let stem = Path::new(&file).file_stem().expect("a name").to_string_lossy();
        if words_of_name(&stem).iter().any(is_banned) {
            wrong.push(file.clone());
        }
        // Reading all tokens of all files takes long: only files in which such a word stands anywhere are read.
        let identifiers: BTreeSet<&str> = text.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
        if !identifiers.iter().any(|name| words_of_name(name).iter().any(is_banned)) {
            continue;
        }
        for (line, name) in Contents::of(&text).identifiers {
            if words_of_name(&name).iter().any(is_banned) {
                wrong.push(format!("{file}:{line}: {name}"));
            }
        }
    }
    assert_none(&wrong, "name what it is or does in the field's words");
}

#[test]
fn comments_use_the_words_of_the_field() {
    let (banned, mut wrong) = (words(BANNED), Vec::new());
    for (file, text) in files() {
        for (at, line) in text.lines().enumerate() {
            let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
            if has_word(comment, &banned) {
                wrong.push(format!("{file}:{}: {}", at + 1, line.trim()));
            }
        }
    }
    assert_none(&wrong, "subject, verb, object, in the field's words");
}

/// One pass over the shipped files, because reading all their tokens takes seconds.
#[test]
fn shipped_messages_types_and_docs_are_specific() {
    let mut wrong = Vec::new();
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let banned = &words(BANNED) | &words(BANNED_IN_MESSAGES);
    for (file, code) in tidy::shipped() {
        let contents = Contents::of(&code);
        for (line, text) in &contents.texts {
            let is_foreign = FOREIGN.iter().any(|(place, words)| *place == file && text.contains(words));
            if !is_foreign && has_word(text, &banned) {
                wrong.push(format!("{file}:{line}: {text}: write as kubectl and kubelet do"));
            }
        }
        for Type { line, keyword, name } in &contents.types {
            if is_participle(name) && !PARTICIPLE_TYPES.iter().any(|(known, _)| known == name) {
                wrong.push(format!("{file}:{line}: {keyword} {name}: a type is a noun that a stranger can guess"));
            }
            modules.entry(name.clone()).or_default().insert(file.clone());
        }
        let repeated = contents.repeated_names().map(|(line, text, item)| {
            format!("{file}:{line}: {text} ({item}): give unit, range, default, error, or source, or leave it out")
        });
        wrong.extend(repeated);
    }
    let is_common = |name: &str| modules.get(name).is_some_and(|files| files.len() > MODULES_PER_TYPE);
    for (name, files) in modules.iter().filter(|(name, _)| is_common(name)) {
        if !COMMON_TYPES.iter().any(|(known, _)| known == name) {
            let files: Vec<&str> = files.iter().map(String::as_str).collect();
            wrong.push(format!("{name}: {}: give each the noun that it is the kind or state of", files.join(", ")));
        }
    }
    let unused = COMMON_TYPES.iter().filter(|(name, _)| !is_common(name));
    let unused = unused.chain(PARTICIPLE_TYPES.iter().filter(|(name, _)| !modules.contains_key(*name)));
    wrong.extend(unused.map(|(name, _)| format!("{name} is listed without need")));
    assert_none(&wrong, "see CONTRIBUTING.md, Language");
}

/// Whether a type's name is a single participle.
fn is_participle(name: &str) -> bool {
    let is_regular = name.ends_with("ed") && name != "Feed" && words_of_name(name).len() == 1;
    is_regular || words(PARTICIPLES).contains(name)
}

#[test]
fn the_reader_of_names_reads() {
    assert_eq!(words_of_name("PodHTTPDoor2_x"), ["pod", "httpdoor2", "x"]);
    let text = "/// Its size.\npub struct Size { /** far */ pub told: u8 }\nfn f(a: b::C) { let mut held = \"nobody\"; a.map(|x| x) }";
    let contents = Contents::of(text);
    let names: Vec<&str> = contents.identifiers.iter().map(|(_, name)| name.as_str()).collect();
    for name in ["Size", "told", "held", "x"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    assert_eq!((contents.types[0].line, contents.types[0].name.as_str()), (2, "Size"));
    assert_eq!(contents.texts[0].1, "\"nobody\"");
    assert_eq!((contents.docs[0].1.as_str(), contents.docs[0].2.as_deref()), ("Its size.", Some("Size")));
}
