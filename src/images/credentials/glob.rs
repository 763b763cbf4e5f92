//! Matches registry patterns against images (spec 03b §2.2 "Match"). Pure.

/// Whether a pattern like `*.dkr.ecr.*.amazonaws.com/team` matches a normalized repository.
///
/// The ports must be equal, the hosts must have the same number of labels and each is matched by shell
/// rules, the path is a plain string prefix. A malformed pattern matches nothing.
pub fn matches(pattern: &str, image: &str) -> bool {
    let (pattern, image) = (RegistryPattern::parse(pattern), RegistryPattern::parse(image));
    pattern.port == image.port
        && pattern.labels.len() == image.labels.len()
        && image.path.starts_with(pattern.path)
        && pattern.labels.iter().zip(&image.labels).all(|(p, i)| label_matches(p, i))
}

struct RegistryPattern<'a> {
    labels: Vec<&'a str>,
    port: Option<&'a str>,
    path: &'a str,
}

impl<'a> RegistryPattern<'a> {
    fn parse(text: &'a str) -> Self {
        let at = text.find('/').unwrap_or(text.len());
        let (authority, path) = text.split_at(at);
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, Some(port)),
            _ => (authority, None),
        };
        Self { labels: host.split('.').collect(), port, path }
    }
}

/// Shell matching of one label: `*`, `?`, `[a-z]`, `[^a-z]`, `\x`.
fn label_matches(pattern: &str, text: &str) -> bool {
    let (pattern, text): (Vec<char>, Vec<char>) = (pattern.chars().collect(), text.chars().collect());
    glob(&pattern, &text)
}

/// Greedy matching with one backtracking point: the last star.
fn glob(pattern: &[char], text: &[char]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p, t));
            p += 1;
            continue;
        }
        if let Some(next) = one(pattern, p, text.get(t).copied()) {
            p = next;
            t += 1;
        } else if let Some((at, from)) = star {
            star = Some((at, from + 1));
            p = at + 1;
            t = from + 1;
        } else {
            return false;
        }
    }
    pattern.get(p..).is_some_and(|rest| rest.iter().all(|&c| c == '*'))
}

/// Matches one character at `p`; returns the next index of the pattern.
fn one(pattern: &[char], p: usize, c: Option<char>) -> Option<usize> {
    let c = c?;
    match *pattern.get(p)? {
        '?' => Some(p + 1),
        '\\' => (*pattern.get(p + 1)? == c).then_some(p + 2),
        '[' => class(pattern, p + 1, c),
        literal => (literal == c).then_some(p + 1),
    }
}

/// Matches a character class after its opening bracket; `None` if it does not match or is not closed.
fn class(pattern: &[char], mut p: usize, c: char) -> Option<usize> {
    let negated = pattern.get(p) == Some(&'^');
    p += usize::from(negated);
    let (mut found, mut ranges) = (false, 0);
    loop {
        if pattern.get(p) == Some(&']') && ranges > 0 {
            return (found != negated).then_some(p + 1);
        }
        let (low, next) = class_char(pattern, p)?;
        let (high, next) = if pattern.get(next) == Some(&'-') { class_char(pattern, next + 1)? } else { (low, next) };
        found |= (low..=high).contains(&c);
        ranges += 1;
        p = next;
    }
}

fn class_char(pattern: &[char], p: usize) -> Option<(char, usize)> {
    match *pattern.get(p)? {
        '\\' => Some((*pattern.get(p + 1)?, p + 2)),
        '-' | ']' => None,
        c => Some((c, p + 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_match_label_by_label() {
        let rows = [
            ("gcr.io", "gcr.io/a/b", true),
            ("*.io", "gcr.io/a", true),
            ("*.io", "eu.gcr.io/a", false),
            ("*.dkr.ecr.*.amazonaws.com", "12.dkr.ecr.eu-1.amazonaws.com/x", true),
            ("*.dkr.ecr.*.amazonaws.com", "12.dkr.ecr.amazonaws.com/x", false),
            ("prefix*.io", "prefix-1.io/x", true),
            ("*x*y", "axbyxy", true),
            ("*a*b", "acbcc", false),
            ("r.io:5000", "r.io:5000/x", true),
            ("r.io", "r.io:5000/x", false),
            ("r.io:5000", "r.io/x", false),
            ("[::1]:5000", "[::1]:5000/x", false), // a bracket opens a class, as upstream reads it
            ("r.io/pong", "r.io/pong/x", true),
            ("r.io/pong", "r.io/pongz", true),
            ("r.io/pong", "r.io/ping", false),
            ("r?o.io", "rfo.io/x", true),
            ("r[a-f]o.io", "rfo.io/x", true),
            ("r[^a-f]o.io", "rfo.io/x", false),
            (r"r\*o.io", "r*o.io/x", true),
            ("r[a-o.io", "rao.io/x", false),
            ("", "", true),
        ];
        for (pattern, image, expected) in rows {
            assert_eq!(matches(pattern, image), expected, "{pattern} {image}");
        }
    }
}
