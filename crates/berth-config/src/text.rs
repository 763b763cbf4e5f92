//! Go's text formatting (`%q`, `%v`, `path.Clean`), for texts that must equal the reference's. Pure.

use std::fmt::Write as _;

/// Formats like `%q`: in double quotes, with unprintable characters escaped.
pub fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\x07' => out.push_str("\\a"),
            '\x08' => out.push_str("\\b"),
            '\x0b' => out.push_str("\\v"),
            '\x0c' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c if is_printable(c) => out.push(c),
            c if (c as u32) < 0x1_0000 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => {
                let _ = write!(out, "\\U{:08x}", c as u32);
            }
        }
    }
    out.push('"');
    out
}

/// Whether Go prints the character unescaped: not a control or format character, nor an unusual space.
fn is_printable(c: char) -> bool {
    !(c.is_control()
        || (c.is_whitespace() && c != ' ')
        || matches!(c as u32, 0xad | 0x200b..=0x200f | 0x202a..=0x202e | 0x2060..=0x206f | 0xfeff | 0xe000..=0xf8ff | 0xfff0..=0xfffb))
}

/// Returns the start of a text that is too long for a message, at most 512 bytes.
pub fn excerpt(text: &str) -> String {
    const LONGEST: usize = 512;
    if text.len() <= LONGEST {
        return text.to_owned();
    }
    let end = (0..=LONGEST).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    format!("{}…", text.split_at(end).0)
}

/// Returns a URL for logging, with its password masked. Everything that could be part of a password is masked: it may
/// contain any character, and need not be well encoded.
pub fn without_password(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").map_or(("", url), |(scheme, rest)| (scheme, rest));
    let user = rest.rsplit_once('@').and_then(|(credentials, host)| Some((credentials.split_once(':')?.0, host)));
    match user {
        Some((user, host)) if scheme.is_empty() => format!("{user}:***@{host}"),
        Some((user, host)) => format!("{scheme}://{user}:***@{host}"),
        None => url.to_owned(),
    }
}

/// Formats a list like `%v`: `[a b c]`.
pub fn list<T: std::fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    format!("[{}]", items.join(" "))
}

/// `path.Clean`: the shortest equivalent path, determined lexically.
pub fn clean_path(path: &str) -> String {
    let rooted = path.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => {
                parts.pop();
            }
            ".." if rooted => {}
            part => parts.push(part),
        }
    }
    match (rooted, parts.is_empty()) {
        (true, _) => format!("/{}", parts.join("/")),
        (false, true) => ".".to_owned(),
        (false, false) => parts.join("/"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoting_escapes_what_go_escapes() {
        for (text, quoted) in [
            ("plain", "\"plain\""),
            ("a\"b\\c", "\"a\\\"b\\\\c\""),
            ("tab\tnl\n", "\"tab\\tnl\\n\""),
            ("\x1b[0m", "\"\\x1b[0m\""),
            ("größe", "\"größe\""),
            ("\u{feff}", "\"\\ufeff\""),
        ] {
            assert_eq!(quote(text), quoted);
        }
    }

    #[test]
    fn excerpts_end_between_characters() {
        assert_eq!(excerpt("short"), "short");
        assert_eq!(excerpt(&"é".repeat(1000)).chars().count(), 256 + 1);
        assert_eq!(excerpt(&format!("x{}", "é".repeat(1000))).chars().count(), 256 + 1);
    }

    #[test]
    fn passwords_are_never_shown_whatever_is_in_them() {
        for (url, shown) in [
            ("http://host/x", "http://host/x"),
            ("http://host:80/x?y=z", "http://host:80/x?y=z"),
            ("https://token@host/x", "https://token@host/x"),
            ("http://me:secret@host/x", "http://me:***@host/x"),
            ("http://me:sec/ret@host/x", "http://me:***@host/x"),
            ("http://me:1/secret@host:80/x", "http://me:***@host:80/x"),
            ("http://me:sec?r#e/t@host", "http://me:***@host"),
            ("http://me:sec@ret/x@host/y", "http://me:***@host/y"),
            ("http://me:sec://ret@host/y", "http://me:***@host/y"),
            ("http://:secret@host", "http://:***@host"),
            ("me:secret@host/x", "me:***@host/x"),
            ("http://me:@host", "http://me:***@host"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }

    #[test]
    fn paths_are_cleaned_by_text() {
        for (path, clean) in [
            ("/var/log/pods", "/var/log/pods"),
            ("/var/log/pods/", "/var/log/pods"),
            ("/a/../b", "/b"),
            ("/../a", "/a"),
            ("a/./b//c", "a/b/c"),
            ("../a", "../a"),
            ("", "."),
            ("/", "/"),
        ] {
            assert_eq!(clean_path(path), clean, "{path}");
        }
    }
}
