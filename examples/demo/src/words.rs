//! Parser of the tool `sh`: words, quotes, variables, `;`, `&&`, `||`. Pure.

use std::collections::BTreeMap;

/// Condition for running a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// Always (`;`).
    Always,
    /// If the previous command succeeded (`&&`).
    Success,
    /// If the previous command failed (`||`).
    Failure,
}

/// One command; its words are expanded when it runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Condition for running it.
    pub when: When,
    /// Words of the command.
    pub words: Vec<Vec<Piece>>,
}

/// A part of a word.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Piece {
    /// Literal text.
    Text(String),
    /// Name of a variable to expand.
    Variable(String),
}

/// Parses a script.
///
/// # Errors
/// A description of the unsupported or malformed syntax.
pub fn parse(script: &str) -> Result<Vec<Step>, String> {
    let mut steps = Vec::new();
    let (mut when, mut words): (When, Vec<Vec<Piece>>) = (When::Always, Vec::new());
    let mut rest = script.chars().peekable();
    while let Some(c) = rest.next() {
        let next = match (c, rest.peek()) {
            (';' | '\n', _) => When::Always,
            ('&', Some('&')) => When::Success,
            ('|', Some('|')) => When::Failure,
            ('&' | '|' | '<' | '>' | '(' | ')' | '`', _) => return Err(format!("{c:?} is not supported")),
            ('#', _) => {
                while rest.next_if(|c| *c != '\n').is_some() {}
                continue;
            }
            (c, _) if c.is_whitespace() => continue,
            _ => {
                words.push(word(c, &mut rest)?);
                continue;
            }
        };
        if next != When::Always {
            rest.next();
        }
        if !words.is_empty() {
            steps.push(Step { when, words: std::mem::take(&mut words) });
            when = next;
        } else if next != When::Always {
            return Err("syntax error: missing command".to_owned());
        }
    }
    if !words.is_empty() {
        steps.push(Step { when, words });
    } else if when != When::Always {
        return Err("syntax error: missing command".to_owned());
    }
    Ok(steps)
}

type Rest<'a> = std::iter::Peekable<std::str::Chars<'a>>;

fn word(first: char, rest: &mut Rest<'_>) -> Result<Vec<Piece>, String> {
    let mut out = vec![Piece::Text(String::new())];
    let mut next = Some(first);
    while let Some(c) = next {
        match c {
            '\'' => loop {
                match rest.next().ok_or("syntax error: unterminated quoted string")? {
                    '\'' => break,
                    c => text(&mut out, c),
                }
            },
            '"' => loop {
                match rest.next().ok_or("syntax error: unterminated quoted string")? {
                    '"' => break,
                    '$' => variable(&mut out, rest)?,
                    '\\' => escaped(&mut out, rest),
                    c => text(&mut out, c),
                }
            },
            '$' => variable(&mut out, rest)?,
            '\\' => rest.next().into_iter().for_each(|c| text(&mut out, c)),
            c => text(&mut out, c),
        }
        next = rest.next_if(|c| !c.is_whitespace() && !matches!(c, ';' | '&' | '|' | '<' | '>' | '(' | ')' | '`'));
    }
    Ok(out)
}

fn text(out: &mut Vec<Piece>, c: char) {
    match out.last_mut() {
        Some(Piece::Text(text)) => text.push(c),
        _ => out.push(Piece::Text(c.to_string())),
    }
}

/// Within double quotes a backslash is literal, except before a character it escapes.
fn escaped(out: &mut Vec<Piece>, rest: &mut Rest<'_>) {
    match rest.next_if(|c| matches!(c, '"' | '\\' | '$' | '`')) {
        Some(c) => text(out, c),
        None => text(out, '\\'),
    }
}

fn variable(out: &mut Vec<Piece>, rest: &mut Rest<'_>) -> Result<(), String> {
    let mut name = String::new();
    if rest.next_if_eq(&'{').is_some() {
        loop {
            match rest.next().ok_or("a brace is not closed")? {
                '}' => break,
                c => name.push(c),
            }
        }
    } else if let Some(c) = rest.next_if(|c| matches!(c, '?' | '$')) {
        name.push(c);
    } else {
        while let Some(c) = rest.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
            name.push(c);
        }
    }
    match name.as_str() {
        "" if rest.peek() == Some(&'(') => return Err("\"$(\" is not supported".to_owned()),
        "" => text(out, '$'),
        _ => out.push(Piece::Variable(name)),
    }
    Ok(())
}

/// Expands a word; unset variables are empty.
pub fn expand(word: &[Piece], variables: &BTreeMap<String, String>) -> String {
    let value = |piece: &Piece| match piece {
        Piece::Text(text) => text.clone(),
        Piece::Variable(name) => variables.get(name).cloned().unwrap_or_default(),
    };
    word.iter().map(value).collect()
}

/// Name and value of an assignment; `None` for any other word.
pub fn assignment(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        && name.chars().next().is_some_and(|c| !c.is_ascii_digit());
    is_name.then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_taken_apart() {
        let variables: BTreeMap<String, String> = [("A".to_owned(), "1 2".to_owned())].into();
        for (script, expected) in [
            ("echo a b", Ok("A[echo|a|b]")),
            ("echo 'a  b' \"$A;\" c\\ d;exit 3", Ok("A[echo|a  b|1 2;|c d]A[exit|3]")),
            ("true&&echo ${A}x || false\n# why\necho $", Ok("A[true]S[echo|1 2x]F[false]A[echo|$]")),
            ("echo \"a\\\"b\\n\" ''", Ok("A[echo|a\"b\\n|]")),
            ("", Ok("")),
            (" ; ;", Ok("")),
            ("a && ", Err("missing")),
            ("&& a", Err("missing")),
            ("a | b", Err("not supported")),
            ("a > b", Err("not supported")),
            ("echo $(x)", Err("not supported")),
            ("echo 'x", Err("unterminated quoted string")),
        ] {
            let shown = parse(script).map(|steps| {
                let shown = steps.iter().map(|step| {
                    let words: Vec<String> = step.words.iter().map(|word| expand(word, &variables)).collect();
                    format!("{}[{}]", format!("{:?}", step.when).chars().next().unwrap_or(' '), words.join("|"))
                });
                shown.collect::<String>()
            });
            match (shown, expected) {
                (Ok(shown), Ok(expected)) => assert_eq!(shown, expected, "{script:?}"),
                (Err(error), Err(text)) => assert!(error.contains(text), "{script:?}: {error}"),
                (shown, expected) => panic!("{script:?}: {shown:?}, not {expected:?}"),
            }
        }
        assert_eq!(assignment("A_1=b=c"), Some(("A_1", "b=c")));
        assert_eq!((assignment("1A=b"), assignment("-a=b"), assignment("=b")), (None, None, None));
    }
}
