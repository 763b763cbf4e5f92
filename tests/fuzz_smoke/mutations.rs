//! Deterministic input mutations: equal for the same seed on every machine.

/// SplitMix64 random number generator: sufficient for mutations, and its numbers do not change with a crate's version.
pub struct Dice(u64);

impl Dice {
    /// A generator whose numbers depend on seed and name only.
    pub fn new(seed: u64, name: &str) -> Self {
        Self(name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % (end.max(1) as u64)).expect("below a usize")
    }

    /// A random range in a text of that length, at most `longest` long.
    fn range(&mut self, length: usize, longest: usize) -> (usize, usize) {
        let from = self.below(length + 1);
        (from, from + self.below((length - from).min(longest) + 1))
    }
}

/// Tokens with a meaning for parsers.
const WORDS: &[&str] = &[
    "\0",
    "\n",
    "\r\n",
    "\t",
    " ",
    "\"",
    "'",
    "''",
    "\\",
    "/",
    "//",
    "/../",
    ".",
    "..",
    ":",
    "::",
    ",",
    ";",
    "=",
    "==",
    "-",
    "--",
    "+",
    "*",
    "?",
    "[",
    "]",
    "{",
    "}",
    "[]",
    "{}",
    "[[",
    "]]",
    "{{",
    "(",
    ")",
    "$",
    "$$",
    "$(A)",
    "%",
    "%%",
    "%zz",
    "#",
    "&",
    "&a ",
    "*a",
    "<<: ",
    "!",
    "!!binary ",
    "|",
    ">",
    "@",
    "~",
    "null",
    "true",
    "0",
    "-0",
    "1",
    "-1",
    "0x",
    "0o7",
    "1e9",
    "1e400",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "18446744073709551616",
    "99999999999999999999999999999999999999",
    "0.000000000000000000001",
    "NaN",
    "inf",
    "Ki",
    "E",
    "m",
    "n",
    "µs",
    "h",
    "\u{feff}",
    "\u{200b}",
    "é",
    "\u{1f600}",
    "\\u0000",
    "\\ud800",
    "- ",
    "---\n",
    "...\n",
    "\n  ",
    "\n- ",
    "2024-02-30T25:61:61Z",
];

/// Derives an input from another by a few random changes.
pub fn mutate(dice: &mut Dice, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds.get(dice.below(seeds.len())).cloned().unwrap_or_default();
    for _ in 0..=dice.below(4) {
        change(dice, &mut bytes, seeds);
        bytes.truncate(LONGEST);
    }
    bytes
}

/// Longest input made by small changes, in bytes.
const LONGEST: usize = 16 << 10;

fn change(dice: &mut Dice, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
    let at = dice.below(bytes.len() + 1);
    match dice.below(9) {
        0 => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << dice.below(8);
            }
        }
        1 => {
            let byte = u8::try_from(dice.below(256)).expect("a byte");
            bytes.insert(at, byte);
        }
        2 => bytes.truncate(at),
        3 => {
            let (from, to) = dice.range(bytes.len(), 32);
            bytes.drain(from..to);
        }
        4 => {
            let (from, to) = dice.range(bytes.len(), 64);
            let piece = bytes[from..to].to_vec();
            bytes.splice(at..at, piece);
        }
        5 => {
            let other = &seeds[dice.below(seeds.len())];
            let (from, to) = dice.range(other.len(), 128);
            bytes.splice(at..at, other[from..to].iter().copied());
        }
        6 => {
            let (from, to) = dice.range(bytes.len(), 8);
            let word = WORDS[dice.below(WORDS.len())];
            bytes.splice(from..to, word.bytes());
        }
        _ => {
            let word = WORDS[dice.below(WORDS.len())];
            bytes.splice(at..at, word.bytes());
        }
    }
}

/// A long input that repeats a piece of a seed, from one separator to the next of its kind. Reveals quadratic time and
/// deep recursion.
pub fn grow(dice: &mut Dice, seed: &[u8], size: usize) -> Vec<u8> {
    let (from, to) = piece(dice, seed);
    let unit = &seed[from..to];
    let times = size / unit.len().max(1);
    let mut bytes = seed[..from].to_vec();
    // Verbatim repetition makes duplicate names; numbering makes distinct ones.
    let is_numbered = dice.below(2) == 0;
    let place = unit.iter().rposition(u8::is_ascii_alphanumeric);
    for i in 0..times {
        match place {
            Some(place) if is_numbered => {
                bytes.extend_from_slice(&unit[..=place]);
                bytes.extend_from_slice(i.to_string().as_bytes());
                bytes.extend_from_slice(&unit[place + 1..]);
            }
            _ => bytes.extend_from_slice(unit),
        }
    }
    bytes.extend_from_slice(&seed[to..]);
    bytes
}

fn piece(dice: &mut Dice, seed: &[u8]) -> (usize, usize) {
    const SEPARATORS: &[u8] = b"\n,; :/.[{\"=-$";
    for _ in 0..8 {
        let separator = SEPARATORS[dice.below(SEPARATORS.len())];
        let places: Vec<usize> = (0..seed.len()).filter(|&i| seed[i] == separator).collect();
        if places.is_empty() {
            continue;
        }
        let nth = dice.below(places.len());
        let to = places.get(nth + 1).copied().unwrap_or(places[nth] + 1);
        return (places[nth], to);
    }
    let from = dice.below(seed.len());
    (from, (from + 1).min(seed.len()))
}
