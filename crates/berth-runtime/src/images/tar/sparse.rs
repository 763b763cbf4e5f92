//! Maps of sparse tar entries. Pure.
//!
//! Formats: old GNU headers, and the three PAX versions (0.0, 0.1, 1.0).

use super::{
    TarError,
    header::{self, BLOCK},
    pax::decimal,
};

/// Maximum number of segments of a file; typical files in images have a handful.
const MOST: usize = 65_536;
/// Maximum digits of a number in a map within the data.
const MOST_DIGITS: usize = 20;
/// Maximum size of a map within the data, bytes.
pub const LONGEST_MAP: usize = 4 << 20;

/// Positions of the content in a file, in ascending order, and the file's length.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Map {
    /// Offset and length of each segment, bytes.
    pub pieces: Vec<(u64, u64)>,
    /// Length of the file, bytes.
    pub size: u64,
}

impl Map {
    /// Validates the map: segments are in order, within the file, and as long as the data.
    ///
    /// # Errors
    /// The map is invalid.
    pub fn checked(self, data: u64) -> Result<Self, TarError> {
        let (mut end, mut total) = (0u64, 0u64);
        for (offset, length) in &self.pieces {
            let next = offset.checked_add(*length).filter(|next| *offset >= end && *next <= self.size);
            end = next.ok_or(TarError::Header("sparse map out of order"))?;
            total = total.saturating_add(*length);
        }
        if total == data { Ok(self) } else { Err(TarError::Header("sparse map does not match the data")) }
    }

    fn push(&mut self, offset: u64, length: u64) -> Result<(), TarError> {
        if self.pieces.len() >= MOST {
            return Err(TarError::Header("sparse map too long"));
        }
        self.pieces.push((offset, length));
        Ok(())
    }
}

/// Sparse map from PAX records.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PaxSparse {
    /// The actual name of the file.
    pub name: Option<Vec<u8>>,
    /// Whether the map is at the start of the data.
    pub is_in_data: bool,
    map: Map,
    is_known: bool,
    offset: Option<u64>,
}

impl PaxSparse {
    /// Adds one record; `key` is without the prefix `GNU.sparse.`.
    ///
    /// # Errors
    /// The record is malformed.
    pub fn apply(&mut self, key: &[u8], value: &[u8]) -> Result<(), TarError> {
        let number = || decimal(value).ok_or(TarError::Header("invalid number in sparse record"));
        match key {
            b"major" => self.is_in_data = number()? == 1,
            b"size" | b"realsize" => {
                self.map.size = number()?;
                self.is_known = true;
            }
            b"name" => self.name = Some(value.to_vec()),
            b"offset" => self.offset = Some(number()?),
            b"numbytes" => {
                let offset = self.offset.take().ok_or(TarError::Header("invalid sparse record"))?;
                self.map.push(offset, number()?)?;
            }
            b"map" => {
                let mut numbers = value.split(|byte| *byte == b',');
                while let Some(offset) = numbers.next() {
                    let pair = decimal(offset).zip(numbers.next().and_then(decimal));
                    let (offset, length) = pair.ok_or(TarError::Header("invalid sparse map"))?;
                    self.map.push(offset, length)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The map; `None` if the entry is not sparse.
    pub fn map(self) -> Option<Map> {
        self.is_known.then_some(self.map)
    }
}

/// Segments and file length from an old GNU header, and whether a block with more segments follows.
///
/// # Errors
/// A number is malformed.
pub fn gnu_header(block: &[u8; BLOCK]) -> Result<(Map, bool), TarError> {
    let mut map = Map { size: header::unsigned(block.get(483..495).unwrap_or_default())?, ..Map::default() };
    gnu_pieces(block.get(386..482).unwrap_or_default(), &mut map)?;
    Ok((map, block.get(482).is_some_and(|byte| *byte != 0)))
}

/// Adds segments from a continuation block; returns whether another block follows.
///
/// # Errors
/// A number is malformed, or there are too many segments.
pub fn gnu_more(block: &[u8; BLOCK], map: &mut Map) -> Result<bool, TarError> {
    gnu_pieces(block.get(..504).unwrap_or_default(), map)?;
    Ok(block.get(504).is_some_and(|byte| *byte != 0))
}

fn gnu_pieces(fields: &[u8], map: &mut Map) -> Result<(), TarError> {
    for pair in fields.chunks_exact(24) {
        if pair.first().is_none_or(|byte| *byte == 0) {
            break;
        }
        let (offset, length) = pair.split_at(12);
        map.push(header::unsigned(offset)?, header::unsigned(length)?)?;
    }
    Ok(())
}

/// Incremental parser of the map at the start of an entry's data: decimal numbers, one per line.
#[derive(Default)]
pub struct DataMap {
    /// Bytes parsed so far.
    length: usize,
    /// Digits of the current line.
    digits: Vec<u8>,
    /// Number of values after the first one, once that is known.
    wanted: Option<usize>,
    numbers: Vec<u64>,
}

impl DataMap {
    /// Parses one more block; returns the segments once the map is complete.
    ///
    /// # Errors
    /// The map is malformed or too long.
    pub fn feed(&mut self, block: &[u8; BLOCK]) -> Result<Option<Vec<(u64, u64)>>, TarError> {
        const WRONG: TarError = TarError::Header("invalid sparse map");
        self.length += block.len();
        if self.length > LONGEST_MAP {
            return Err(TarError::TooLong(self.length as u64));
        }
        for byte in block {
            if *byte != b'\n' {
                self.digits.push(*byte);
                if self.digits.len() > MOST_DIGITS {
                    return Err(WRONG);
                }
                continue;
            }
            let number = decimal(&self.digits).ok_or(WRONG)?;
            self.digits.clear();
            if self.wanted.is_some() {
                self.numbers.push(number);
            } else {
                let count = usize::try_from(number).ok().filter(|count| *count <= MOST);
                self.wanted = Some(count.ok_or(WRONG)? * 2);
            }
            if self.wanted == Some(self.numbers.len()) {
                let (pairs, _) = self.numbers.as_chunks::<2>();
                return Ok(Some(pairs.iter().map(|[offset, length]| (*offset, *length)).collect()));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_must_fit_the_file_and_the_data() {
        let map = |pieces: &[(u64, u64)], size| Map { pieces: pieces.to_vec(), size };
        for (map, data, is_good) in [
            (map(&[], 10), 0, true),
            (map(&[(0, 5), (5, 5)], 10), 10, true),
            (map(&[(8, 3)], 10), 3, false),
            (map(&[(5, 1), (4, 1)], 10), 2, false),
            (map(&[(u64::MAX, 2)], 10), 2, false),
            (map(&[(0, 5)], 10), 4, false),
        ] {
            assert_eq!(map.clone().checked(data).is_ok(), is_good, "{map:?}");
        }
    }

    #[test]
    fn a_map_in_the_data_may_span_blocks() {
        let mut text = String::from("100\n");
        (0..100).for_each(|i| text.push_str(&format!("{}\n{}\n", i * 100_000, 10)));
        let mut bytes = text.into_bytes();
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        let mut map = DataMap::default();
        let mut found = None;
        for block in bytes.chunks_exact(BLOCK) {
            assert!(found.is_none());
            found = map.feed(block.try_into().expect("a block")).expect("a map");
        }
        assert_eq!(found.expect("whole").len(), 100);
    }

    fn blocks(text: &str) -> Vec<[u8; BLOCK]> {
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        bytes.chunks_exact(BLOCK).map(|block| block.try_into().expect("a block")).collect()
    }

    /// Each byte is read once, even if the map does not end.
    #[test]
    fn the_longest_map_in_the_data_is_read_at_once() {
        let text = "65536\n".to_owned() + &"12345678901234567890\n".repeat(2 * MOST);
        let mut map = DataMap::default();
        let begun = std::time::Instant::now();
        let fed: Vec<_> = blocks(&text).iter().map(|block| map.feed(block).expect("digits")).collect();
        assert!(begun.elapsed() < std::time::Duration::from_secs(5), "{:?}", begun.elapsed());
        let (last, before) = fed.split_last().expect("blocks");
        assert!(before.iter().all(Option::is_none));
        assert_eq!(last.as_ref().map(Vec::len), Some(MOST));
    }

    #[test]
    fn broken_maps_in_the_data_are_refused() {
        for text in ["\n", "x\n", "65537\n", "1\n0\nx\n", "1\n\n1\n", &"1".repeat(21), "99999999999999999999999\n"] {
            let is_refused =
                blocks(text).iter().try_for_each(|block| DataMap::default().feed(block).map(drop)).is_err();
            assert!(is_refused, "{text:?}");
        }
        assert_eq!(DataMap::default().feed(&blocks("0\n")[0]).expect("a map"), Some(Vec::new()));
    }
}
