//! Command line parser with the POSIX-like grammar of kubelet's flags. Pure. Spec 01 §2.1.

use std::ffi::OsString;

use super::{FLAGS, Flag, KubeletSettings, find, values};
use crate::text::quote;

/// Result of parsing a command line, beside the settings.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ParsedArguments {
    /// Arguments that are not flags, in order.
    pub words: Vec<String>,
    /// Names of the given flags, in order of first use.
    pub given: Vec<&'static str>,
    /// One warning per deprecated flag given.
    pub deprecations: Vec<String>,
}

/// Parses the arguments after the program name into `settings`.
///
/// # Errors
/// The first malformed argument, with the reference's text; `settings` then has the values of the preceding ones.
pub fn parse(args: &[OsString], settings: &mut KubeletSettings) -> Result<ParsedArguments, String> {
    let words: Vec<String> = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let mut reader = FlagParser { rest: &words, parsed: ParsedArguments::default(), settings };
    while let Some((word, rest)) = reader.rest.split_first() {
        reader.rest = rest;
        match word.strip_prefix("--") {
            Some("") => {
                reader.parsed.words.extend(rest.iter().cloned());
                break;
            }
            Some(long) => reader.long(word, long)?,
            None => match word.strip_prefix('-') {
                Some(letters) if !letters.is_empty() => reader.letters(letters)?,
                _ => reader.parsed.words.push(word.clone()),
            },
        }
    }
    Ok(reader.parsed)
}

struct FlagParser<'a> {
    rest: &'a [String],
    parsed: ParsedArguments,
    settings: &'a mut KubeletSettings,
}

impl FlagParser<'_> {
    /// Parses `--name`, `--name=value`, `--name value`.
    fn long(&mut self, word: &str, long: &str) -> Result<(), String> {
        if long.starts_with(['-', '=']) {
            return Err(format!("bad flag syntax: {word}"));
        }
        let (name, value) = match long.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (long, None),
        };
        let flag = find(name).ok_or_else(|| format!("unknown flag: --{name}"))?;
        let value = match value.or_else(|| flag.value_if_bare().map(str::to_owned)).or_else(|| self.next_word()) {
            Some(value) => value,
            None => return Err(format!("flag needs an argument: {word}")),
        };
        self.set(flag, &value)
    }

    /// Parses `-v 2`, `-v=2`, `-v2`, `-hv2`.
    fn letters(&mut self, letters: &str) -> Result<(), String> {
        let mut left = letters;
        while let Some(letter) = left.chars().next() {
            let after = left.get(letter.len_utf8()..).unwrap_or_default();
            let flag = FLAGS
                .iter()
                .find(|flag| flag.shorthand == Some(letter))
                .ok_or_else(|| format!("unknown shorthand flag: '{letter}' in -{left}"))?;
            let (value, next) = match (after.strip_prefix('='), flag.value_if_bare()) {
                (Some(value), _) if !value.is_empty() => (value.to_owned(), ""),
                (_, Some(value)) => (value.to_owned(), after),
                (_, None) if !after.is_empty() => (after.to_owned(), ""),
                (_, None) => match self.next_word() {
                    Some(value) => (value, ""),
                    None => return Err(format!("flag needs an argument: '{letter}' in -{left}")),
                },
            };
            self.set(flag, &value)?;
            left = next;
        }
        Ok(())
    }

    fn next_word(&mut self) -> Option<String> {
        let (word, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(word.clone())
    }

    fn set(&mut self, flag: &'static Flag, value: &str) -> Result<(), String> {
        let first = !self.parsed.given.contains(&flag.name);
        values::set(flag, value, first, self.settings).map_err(|cause| {
            let shown = match flag.shorthand {
                Some(letter) => format!("-{letter}, --{}", flag.name),
                None => format!("--{}", flag.name),
            };
            format!("invalid argument {} for {} flag: {cause}", quote(value), quote(&shown))
        })?;
        if first {
            self.parsed.given.push(flag.name);
            self.parsed.deprecations.extend(flag.deprecation());
        }
        Ok(())
    }
}
