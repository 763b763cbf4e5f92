//! From stacks to a profile as `pprof` reads it. Pure.
//!
//! Addresses and mappings are always there, so that a stripped program's profile can be read with
//! the unstripped one at hand; names are there where the program knows them.

use std::collections::HashMap;

use crate::proto::profile::{Function, Line, Location, Mapping, Profile, Sample, ValueType};

/// A piece of the program in memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapped {
    /// First address.
    pub start: u64,
    /// The address after the last.
    pub limit: u64,
    /// Where in the file it begins.
    pub offset: u64,
    /// The file.
    pub file: String,
}

/// What an address is called; several where calls were inlined, the innermost first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named {
    /// Function.
    pub function: String,
    /// Source file, empty where unknown.
    pub file: String,
    /// Line, 0 where unknown.
    pub line: i64,
}

/// When and how often samples were taken, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Begin, since the epoch.
    pub at: i64,
    /// Duration.
    pub duration: i64,
    /// Processor time between two samples.
    pub period: i64,
}

/// The executable pieces of `/proc/self/maps`.
pub fn mappings(maps: &str) -> Vec<Mapped> {
    let piece = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (start, limit) = words.next()?.split_once('-')?;
        let is_code = words.next()?.contains('x');
        let offset = words.next()?;
        let file = words.nth(2)?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        is_code.then_some(())?;
        Some(Mapped { start: hex(start)?, limit: hex(limit)?, offset: hex(offset)?, file: file.to_owned() })
    };
    maps.lines().filter_map(piece).collect()
}

/// A profile of processor time. `name` tells what an address is called.
pub fn processor(stacks: &[Vec<u64>], mapped: &[Mapped], taken: Taken, name: impl Fn(u64) -> Vec<Named>) -> Profile {
    let mut texts = Texts::default();
    texts.at("");
    let kind = |texts: &mut Texts, of: &str, unit: &str| ValueType { r#type: texts.at(of), unit: texts.at(unit) };
    let mut profile = Profile {
        sample_type: vec![kind(&mut texts, "samples", "count"), kind(&mut texts, "cpu", "nanoseconds")],
        period_type: Some(kind(&mut texts, "cpu", "nanoseconds")),
        period: taken.period,
        time_nanos: taken.at,
        duration_nanos: taken.duration,
        ..Profile::default()
    };
    for (i, piece) in mapped.iter().enumerate() {
        profile.mapping.push(Mapping {
            id: i as u64 + 1,
            memory_start: piece.start,
            memory_limit: piece.limit,
            file_offset: piece.offset,
            filename: texts.at(&piece.file),
            ..Mapping::default()
        });
    }
    let mut places = Places { known: HashMap::new(), functions: HashMap::new(), mapped, name };
    let mut counts: HashMap<Vec<u64>, i64> = HashMap::new();
    for stack in stacks {
        // What a frame returns to comes after the call that it is in.
        let call = |(depth, ip): (usize, &u64)| if depth == 0 { *ip } else { ip.saturating_sub(1) };
        let ids = stack.iter().enumerate().map(call).map(|ip| places.id(ip, &mut profile, &mut texts)).collect();
        *counts.entry(ids).or_default() += 1;
    }
    let mut samples: Vec<Sample> = counts
        .into_iter()
        .map(|(location_id, n)| Sample { location_id, value: vec![n, n.saturating_mul(taken.period)], label: vec![] })
        .collect();
    samples.sort_by(|a, b| b.value.cmp(&a.value).then_with(|| a.location_id.cmp(&b.location_id)));
    profile.sample = samples;
    profile.string_table = texts.list;
    profile
}

/// Locations and functions by what they are.
struct Places<'a, N> {
    known: HashMap<u64, u64>,
    functions: HashMap<(String, String), u64>,
    mapped: &'a [Mapped],
    name: N,
}

impl<N: Fn(u64) -> Vec<Named>> Places<'_, N> {
    fn id(&mut self, address: u64, profile: &mut Profile, texts: &mut Texts) -> u64 {
        if let Some(id) = self.known.get(&address) {
            return *id;
        }
        let id = self.known.len() as u64 + 1;
        self.known.insert(address, id);
        let piece = self.mapped.iter().position(|piece| (piece.start..piece.limit).contains(&address));
        let names = (self.name)(address);
        if let Some(mapping) = piece.and_then(|i| profile.mapping.get_mut(i)) {
            mapping.has_functions |= !names.is_empty();
        }
        let line = names.into_iter().map(|named| self.line(named, profile, texts)).collect();
        let mapping_id = piece.map_or(0, |i| i as u64 + 1);
        profile.location.push(Location { id, mapping_id, address, line, is_folded: false });
        id
    }

    fn line(&mut self, named: Named, profile: &mut Profile, texts: &mut Texts) -> Line {
        let next = self.functions.len() as u64 + 1;
        let (name, filename) = (texts.at(&named.function), texts.at(&named.file));
        let function_id = *self.functions.entry((named.function, named.file)).or_insert_with(|| {
            profile.function.push(Function { id: next, name, system_name: name, filename, start_line: 0 });
            next
        });
        Line { function_id, line: named.line }
    }
}

/// The string table.
#[derive(Default)]
struct Texts {
    list: Vec<String>,
    known: HashMap<String, i64>,
}

impl Texts {
    fn at(&mut self, text: &str) -> i64 {
        if let Some(at) = self.known.get(text) {
            return *at;
        }
        let at = i64::try_from(self.list.len()).unwrap_or(0);
        self.list.push(text.to_owned());
        self.known.insert(text.to_owned(), at);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_for_their_code() {
        let maps = "55a0-55b0 r--p 00000000 fe:01 1 /usr/bin/berth\n55b0-55c0 r-xp 00001000 fe:01 1 /usr/bin/berth\n\
                    7ff0-7ff8 r-xp 00000000 00:00 0 [vdso]\n8000-8001 r-xp 00000000 00:00 0\nnonsense\n";
        let berth = Mapped { start: 0x55b0, limit: 0x55c0, offset: 0x1000, file: "/usr/bin/berth".to_owned() };
        let found = mappings(maps);
        assert_eq!((found.len(), &found[0], found[1].file.as_str()), (2, &berth, "[vdso]"));
    }

    #[test]
    fn equal_stacks_are_one_sample_and_places_are_shared() {
        let mapped = [Mapped { start: 0x100, limit: 0x200, offset: 0, file: "berth".to_owned() }];
        let taken = Taken { at: 1, duration: 2, period: 10 };
        let name = |address: u64| match address {
            0x110 => vec![Named { function: "leaf".to_owned(), file: "a.rs".to_owned(), line: 7 }],
            _ => vec![],
        };
        let profile = processor(&[vec![0x110, 0x121], vec![0x110, 0x121], vec![0x300]], &mapped, taken, name);
        let samples: Vec<(&[u64], &[i64])> =
            profile.sample.iter().map(|s| (s.location_id.as_slice(), s.value.as_slice())).collect();
        assert_eq!(samples, [(&[1, 2][..], &[2, 20][..]), (&[3], &[1, 10])]);
        let places: Vec<(u64, u64, usize)> =
            profile.location.iter().map(|l| (l.mapping_id, l.address, l.line.len())).collect();
        assert_eq!(places, [(1, 0x110, 1), (1, 0x120, 0), (0, 0x300, 0)], "a caller's address is within its call");
        let text = |at: i64| profile.string_table[usize::try_from(at).expect("in the table")].as_str();
        assert_eq!((text(0), text(profile.function[0].name), text(profile.mapping[0].filename)), ("", "leaf", "berth"));
        assert_eq!(text(profile.sample_type[1].unit), "nanoseconds");
    }
}
