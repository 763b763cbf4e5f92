//! CPU lists: `0-3,8`. Pure.

use std::collections::BTreeSet;

use crate::text::quote;

/// Exclusive upper bound of CPU numbers: more CPUs than any machine has.
const MOST: u32 = 1 << 16;

/// Parses a CPU list; an empty text is an empty list.
///
/// # Errors
/// The list is malformed; contains the reference's text.
pub fn parse(text: &str) -> Result<BTreeSet<u32>, String> {
    let mut ranges = Vec::new();
    for range in text.split(',').filter(|_| !text.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last >= MOST {
            return Err(format!("invalid range {} ({first} > {last})", quote(range)));
        }
        ranges.push((first, last));
    }
    // Visits each CPU once, however often the text contains it.
    ranges.sort_unstable();
    let mut next = 0;
    let mut new = |(first, last): (u32, u32)| {
        let from = first.max(next);
        next = next.max(last + 1);
        from..=last
    };
    Ok(ranges.into_iter().flat_map(&mut new).collect())
}

fn number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("strconv.Atoi: parsing {}: invalid syntax", quote(text)))
}

/// Formats a CPU list in its shortest form.
pub fn show(cpus: &BTreeSet<u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let show = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    ranges.iter().map(show).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_shown() {
        for (text, shown) in [("", ""), ("0-3,8", "0-3,8"), ("2,1,0", "0-2"), ("5-5", "5"), ("0,2,4-6", "0,2,4-6")] {
            assert_eq!(parse(text).map(|cpus| show(&cpus)), Ok(shown.to_owned()), "{text}");
        }
        for (text, error) in [
            ("x", "strconv.Atoi: parsing \"x\": invalid syntax"),
            ("3-1", "invalid range \"3-1\" (3 > 1)"),
            ("1,", "strconv.Atoi: parsing \"\": invalid syntax"),
        ] {
            assert_eq!(parse(text), Err(error.to_owned()), "{text}");
        }
        assert!(parse("0-4294967295").is_err());
    }
}
