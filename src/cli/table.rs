//! Text tables for terminals: columns three spaces apart, ages, optional color. Pure.

use jiff::Timestamp;

/// Text color, with its meaning.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Color {
    /// Healthy.
    Green,
    /// In progress.
    Yellow,
    /// Failed.
    Red,
    /// Unimportant.
    Dim,
}

/// Table cell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cell {
    text: String,
    colour: Option<Color>,
}

impl Cell {
    /// Creates a cell with an optional color. Control characters in the text are replaced.
    pub fn painted(text: impl Into<String>, colour: Option<Color>) -> Self {
        Self { text: sanitize(&text.into()), colour }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::painted(text, None)
    }
}

/// Renders rows without color.
pub fn columns(rows: &[Vec<String>]) -> String {
    let cells: Vec<Vec<Cell>> = rows.iter().map(|row| row.iter().map(Cell::from).collect()).collect();
    painted(&cells, false)
}

/// Renders rows, with color if `in_colour`.
pub fn painted(rows: &[Vec<Cell>], in_colour: bool) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |at: usize| rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.text.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let last = row.len().saturating_sub(1);
        for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // The last cell needs no padding.
            let width = if at == last { 0 } else { *width };
            let padding = width.saturating_sub(cell.text.chars().count());
            out.push_str(&paint(&cell.text, cell.colour.filter(|_| in_colour)));
            if at != last {
                out.extend(std::iter::repeat_n(' ', padding + 3));
            }
        }
        out.truncate(out.trim_end_matches(' ').len());
        out.push('\n');
    }
    out
}

/// Wraps a text in ANSI color codes.
pub fn paint(text: &str, colour: Option<Color>) -> String {
    let Some(colour) = colour else { return text.to_owned() };
    let code = match colour {
        Color::Green => 32,
        Color::Yellow => 33,
        Color::Red => 31,
        Color::Dim => 2,
    };
    format!("\u{1b}[{code}m{text}\u{1b}[0m")
}

/// Age as kubectl prints it: one unit, the largest that fits.
pub fn age(since: Timestamp, now: Timestamp) -> String {
    let seconds = now.as_second().saturating_sub(since.as_second()).max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Duration in seconds as text with about three digits.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 0.001 => "0".to_owned(),
        s if s < 1.0 => format!("{:.0}ms", s * 1000.0),
        s if s < 10.0 => format!("{s:.1}s"),
        s if s < 120.0 => format!("{s:.0}s"),
        s if s < 7200.0 => format!("{:.0}m", s / 60.0),
        s if s < 172_800.0 => format!("{:.0}h", s / 3600.0),
        s => format!("{:.0}d", s / 86_400.0),
    }
}

/// Replaces control characters and bidirectional text controls, so that foreign text cannot control the terminal or
/// reorder the text beside it.
pub fn sanitize(text: &str) -> String {
    let turns = |c| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if c.is_control() || turns(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Joins a text of several lines into one line of at most `most` characters.
pub fn line(text: &str, most: usize) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    let joined = words.join(" ");
    match joined.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", joined.get(..at).unwrap_or_default().trim_end()),
        None => joined,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_change_no_width() {
        let row = |a: &str, b: &str| vec![Cell::painted(a, Some(Color::Red)), Cell::from(b)];
        let rows = [row("A", "B"), row("longer", "x"), row("y", "")];
        assert_eq!(painted(&rows, false), "A        B\nlonger   x\ny\n");
        let lines = painted(&rows, true);
        assert!(lines.starts_with("\u{1b}[31mA\u{1b}[0m        B\n\u{1b}[31mlonger\u{1b}[0m   x\n"), "{lines:?}");
    }

    #[test]
    fn times_have_few_digits() {
        for (value, expected) in
            [(0.0, "0"), (0.0123, "12ms"), (1.26, "1.3s"), (12.6, "13s"), (150.0, "2m"), (9000.0, "2h"), (2e5, "2d")]
        {
            assert_eq!(seconds(value), expected);
        }
    }

    #[test]
    fn foreign_text_stays_where_it_stands() {
        assert_eq!(sanitize("a\u{1b}[2Jb\n\u{202e}"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}");
        let rows = [vec!["a\u{1b}[31m".to_owned(), "b\rc".to_owned()]];
        assert_eq!(columns(&rows), "a\u{fffd}[31m   b\u{fffd}c\n");
        for (text, expected) in [
            ("one\n  two\tthree\n", "one two thr…"),
            ("one two thr", "one two thr"),
            ("", ""),
            ("\u{e4}bc", "\u{e4}bc"),
        ] {
            assert_eq!(line(text, 11), expected);
        }
    }
}
