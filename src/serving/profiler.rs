//! From stacks to a profile as `pprof` reads it. Pure.
//!
//! Addresses and mappings are always there, so that a stripped program's profile can be read with
//! the unstripped one at hand; names are there where the program knows them.

use std::collections::HashMap;

use berth_proto::profile::{Function, Line, Location, Mapping, Profile, Sample, ValueType};

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
    /// The function as the linker knows it: from a name that is told twice `pprof` cuts what is in angle brackets.
    pub symbol: String,
    /// Source file, empty where unknown.
    pub file: String,
    /// Line, 0 where unknown.
    pub line: i64,
}

/// When and how often samples were taken; times in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// Begin, since the epoch.
    pub at: i64,
    /// Duration.
    pub duration: i64,
    /// Between two samples: processor time, or bytes.
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
    let mut draft = Draft::new(&[("samples", "count"), ("cpu", "nanoseconds")], mapped, name);
    let mut counts: HashMap<Vec<u64>, i64> = HashMap::new();
    for stack in stacks {
        *counts.entry(draft.places(stack, 0)).or_default() += 1;
    }
    let samples = counts.into_iter().map(|(places, n)| (places, vec![n, n.saturating_mul(taken.period)]));
    draft.finish(samples.collect(), ("cpu", "nanoseconds"), taken)
}

/// What was asked for and what is held of it, as noted of one stack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Memory {
    /// Addresses of instructions, innermost first.
    pub stack: Vec<u64>,
    /// Blocks and bytes that were asked for.
    pub asked: (i64, i64),
    /// Blocks and bytes that were asked for and are not freed.
    pub held: (i64, i64),
}

/// Which of its values a profile of memory shows first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    /// Bytes held.
    Held,
    /// Bytes asked for.
    Asked,
}

/// A profile of memory, in the four values of Go's. `taken.period` is in bytes; `comment` is shown by `pprof -comments`.
pub fn memory(
    noted: &[Memory],
    (mapped, taken): (&[Mapped], Taken),
    (shown, comment): (Shown, &str),
    name: impl Fn(u64) -> Vec<Named>,
) -> Profile {
    const KINDS: [(&str, &str); 4] =
        [("alloc_objects", "count"), ("alloc_space", "bytes"), ("inuse_objects", "count"), ("inuse_space", "bytes")];
    let mut draft = Draft::new(&KINDS, mapped, name);
    let mut samples = Vec::new();
    for Memory { stack, asked, held } in noted {
        let places = draft.places(stack, OWN);
        samples.push((places, vec![asked.0, asked.1, held.0, held.1]));
    }
    let mut profile = draft.finish(samples, ("space", "bytes"), taken);
    let first = KINDS[if shown == Shown::Held { 3 } else { 1 }].0;
    let mut text = |text: &str| {
        profile.string_table.push(text.to_owned());
        i64::try_from(profile.string_table.len() - 1).unwrap_or(0)
    };
    let (first, comment, drop_frames) = (text(first), text(comment), text(ALLOCATOR));
    Profile { default_sample_type: first, comment: vec![comment], drop_frames, ..profile }
}

/// Innermost frames among which the allocator's own may be.
const OWN: usize = 16;

/// How functions on the way from a request for memory to its noting begin, for readers that name places themselves.
/// They drop what such a function calls, too: nothing that stands below a thread (`__rust_try`) may match.
const ALLOCATOR: &str = "(backtrace::|berth_sys::allocations::|<berth_sys::allocations::|__rust_alloc|__rust_realloc|__rust_dealloc|__rustc::|alloc::alloc::|<alloc::alloc::|alloc::raw_vec::|<alloc::raw_vec::).*";

fn is_allocator(function: &str) -> bool {
    let roots = ALLOCATOR.trim_start_matches('(').trim_end_matches(").*").split('|');
    // Names of generic functions begin with the type they are of.
    roots.into_iter().any(|root| function.trim_start_matches('_').starts_with(root.trim_start_matches('_')))
}

/// What a sample was scaled from: the chance that a block of `bytes / blocks` is noted, at one per `interval` bytes.
pub fn scaled(blocks: u64, bytes: u64, interval: u64) -> (i64, i64) {
    if blocks == 0 || bytes == 0 {
        return (0, 0);
    }
    let (blocks, bytes) = (blocks as f64, bytes as f64);
    let factor = 1.0 / (1.0 - (-(bytes / blocks) / interval as f64).exp());
    ((blocks * factor) as i64, (bytes * factor) as i64)
}

/// A profile that is being written.
struct Draft<'a, N> {
    profile: Profile,
    texts: Texts,
    places: Places<'a, N>,
}

impl<'a, N: Fn(u64) -> Vec<Named>> Draft<'a, N> {
    fn new(kinds: &[(&str, &str)], mapped: &'a [Mapped], name: N) -> Self {
        let mut texts = Texts::default();
        texts.at("");
        let sample_type = kinds.iter().map(|kind| texts.kind(*kind)).collect();
        let mapping = mapped.iter().enumerate().map(|(i, piece)| Mapping {
            id: i as u64 + 1,
            memory_start: piece.start,
            memory_limit: piece.limit,
            file_offset: piece.offset,
            filename: texts.at(&piece.file),
            ..Mapping::default()
        });
        let profile = Profile { sample_type, mapping: mapping.collect(), ..Profile::default() };
        let places = Places { known: HashMap::new(), functions: HashMap::new(), mapped, name };
        Self { profile, texts, places }
    }

    /// The places of a stack, less the allocator's among the `own` innermost ones, and what these have called.
    fn places(&mut self, stack: &[u64], own: usize) -> Vec<u64> {
        // What a frame returns to comes after the call that it is in.
        let call = |(depth, ip): (usize, &u64)| if depth == 0 { *ip } else { ip.saturating_sub(1) };
        let calls: Vec<u64> = stack.iter().enumerate().map(call).collect();
        // Of calls that were inlined the outermost one says whose place it is.
        let is_own = |ip: &u64| (self.places.name)(*ip).last().is_some_and(|named| is_allocator(&named.function));
        let skipped = calls.iter().take(own).rposition(is_own).map_or(0, |last| last + 1);
        calls.into_iter().skip(skipped).map(|ip| self.places.id(ip, &mut self.profile, &mut self.texts)).collect()
    }

    fn finish(mut self, samples: Vec<(Vec<u64>, Vec<i64>)>, period: (&str, &str), taken: Taken) -> Profile {
        let sample = |(location_id, value)| Sample { location_id, value, label: vec![] };
        let mut sample: Vec<Sample> = samples.into_iter().map(sample).collect();
        sample.sort_by(|a, b| b.value.cmp(&a.value).then_with(|| a.location_id.cmp(&b.location_id)));
        let period_type = Some(self.texts.kind(period));
        let Taken { at: time_nanos, duration: duration_nanos, period } = taken;
        let string_table = self.texts.list;
        Profile { sample, period_type, period, time_nanos, duration_nanos, string_table, ..self.profile }
    }
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
        let system_name = texts.at(&named.symbol);
        let function_id = *self.functions.entry((named.function, named.file)).or_insert_with(|| {
            profile.function.push(Function { id: next, name, system_name, filename, start_line: 0 });
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
    fn kind(&mut self, (kind, unit): (&str, &str)) -> ValueType {
        ValueType { r#type: self.at(kind), unit: self.at(unit) }
    }

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
            0x110 => vec![Named {
                function: "<T>::leaf".to_owned(),
                symbol: "_R4leaf".to_owned(),
                file: "a.rs".to_owned(),
                line: 7,
            }],
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
        assert_eq!((text(0), text(profile.mapping[0].filename)), ("", "berth"));
        let function = &profile.function[0];
        assert_eq!((text(function.name), text(function.system_name)), ("<T>::leaf", "_R4leaf"));
        assert_eq!(text(profile.sample_type[1].unit), "nanoseconds");
    }

    #[test]
    fn memory_begins_where_the_allocator_ends() {
        let names = |address: u64| {
            let function = match address {
                0x10 => "backtrace::backtrace::trace_unsynchronized",
                0x1f => "<berth_sys::allocations::Sampled as core::alloc::global::GlobalAlloc>::alloc",
                0x2f => "__rustc::__rust_alloc",
                0x3f => "alloc::alloc::alloc",
                _ => "reader",
            };
            vec![Named { function: function.to_owned(), symbol: String::new(), file: "a.rs".to_owned(), line: 1 }]
        };
        let noted = [Memory { stack: vec![0x10, 0x20, 0x30, 0x40, 0x50], asked: (4, 40), held: (-1, -10) }];
        let taken = Taken { at: 1, duration: 2, period: 512 };
        let profile = memory(&noted, (&[], taken), (Shown::Held, "so it is"), names);
        let text = |at: i64| profile.string_table[usize::try_from(at).expect("in the table")].as_str();
        let kinds: Vec<(&str, &str)> = profile.sample_type.iter().map(|k| (text(k.r#type), text(k.unit))).collect();
        let wanted = [
            ("alloc_objects", "count"),
            ("alloc_space", "bytes"),
            ("inuse_objects", "count"),
            ("inuse_space", "bytes"),
        ];
        assert_eq!(kinds, wanted);
        let period = profile.period_type.as_ref().map(|kind| (text(kind.r#type), text(kind.unit)));
        assert_eq!((period, profile.period), (Some(("space", "bytes")), 512));
        assert_eq!((text(profile.default_sample_type), text(profile.comment[0])), ("inuse_space", "so it is"));
        assert_eq!(profile.sample[0].value, [4, 40, -1, -10]);
        let functions: Vec<&str> = profile.function.iter().map(|function| text(function.name)).collect();
        assert_eq!((functions.as_slice(), profile.sample[0].location_id.len()), (&["reader"][..], 1));
    }

    #[test]
    fn only_the_allocators_functions_are_its_own() {
        for (function, is_own) in [
            ("__rust_alloc_zeroed", true),
            ("__rustc::__rust_realloc", true),
            ("alloc::raw_vec::RawVec<T,A>::grow_one", true),
            ("<alloc::alloc::Global as core::alloc::Allocator>::allocate", true),
            ("__rust_try", false),
            ("rustls::msgs::deframer::Deframer::read", false),
            ("rustix::fs::openat", false),
            ("std::sys::backtrace::__rust_begin_short_backtrace", false),
        ] {
            assert_eq!(is_allocator(function), is_own, "{function}");
        }
    }

    #[test]
    fn few_samples_stand_for_many_small_blocks() {
        for (blocks, bytes, wanted) in [
            (0, 0, (0, 0)),
            (1, 512 << 10, (1, 829_411)),
            (2, 128, (16_385, 1_048_640)),
            (1, 100 << 20, (1, 104_857_600)),
        ] {
            assert_eq!(scaled(blocks, bytes, 512 << 10), wanted, "{blocks} of {bytes}");
        }
    }
}
