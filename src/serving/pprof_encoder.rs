//! Encoder of profiles for pprof: sampled stacks to `profile.proto`. Pure.
//!
//! Addresses and mappings are always included, so that a profile of a stripped program can be read with the unstripped
//! one at hand; function names are included where the program has them.

use std::collections::HashMap;

use berth_proto::profile::{Function, Line, Location, Mapping, Profile, Sample, ValueType};
use berth_server::ports::MemoryView;

/// An executable mapping of the process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CodeMapping {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub limit: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Path of the file.
    pub file: String,
}

/// Function at an address. An address has several where calls were inlined, the innermost first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Symbol {
    /// Demangled name.
    pub function: String,
    /// Linker's name. It must differ from the demangled one: where they are equal, pprof removes what is in angle brackets.
    pub linkage_name: String,
    /// Source file; empty if unknown.
    pub file: String,
    /// Line; 0 if unknown.
    pub line: i64,
}

/// Time and interval of a sampling, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SamplingWindow {
    /// Start, since the Unix epoch.
    pub start: i64,
    /// Duration in nanoseconds; 0 for a heap profile without a requested duration.
    pub duration: i64,
    /// Interval between two samples: CPU time, or bytes.
    pub period: i64,
}

/// Parses the executable mappings of `/proc/self/maps`.
pub fn mappings(maps: &str) -> Vec<CodeMapping> {
    let parse = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (start, limit) = words.next()?.split_once('-')?;
        let is_code = words.next()?.contains('x');
        let offset = words.next()?;
        let file = words.nth(2)?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        is_code.then_some(())?;
        Some(CodeMapping { start: hex(start)?, limit: hex(limit)?, offset: hex(offset)?, file: file.to_owned() })
    };
    maps.lines().filter_map(parse).collect()
}

/// Encodes a CPU profile. `symbols` returns the functions at an address.
pub fn cpu(
    stacks: &[Vec<u64>],
    mappings: &[CodeMapping],
    sampling: SamplingWindow,
    symbols: impl Fn(u64) -> Vec<Symbol>,
) -> Profile {
    let mut encoder = Encoder::new(&[("samples", "count"), ("cpu", "nanoseconds")], mappings, symbols);
    let mut counts: HashMap<Vec<u64>, i64> = HashMap::new();
    for stack in stacks {
        *counts.entry(encoder.locations(stack, 0)).or_default() += 1;
    }
    let samples = counts.into_iter().map(|(locations, n)| (locations, vec![n, n.saturating_mul(sampling.period)]));
    encoder.finish(samples.collect(), ("cpu", "nanoseconds"), sampling)
}

/// Memory of one stack: estimates from its samples.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StackMemory {
    /// Return addresses, innermost first.
    pub frames: Vec<u64>,
    /// Blocks and bytes allocated.
    pub allocated: (i64, i64),
    /// Blocks and bytes in use.
    pub live: (i64, i64),
}

/// Encodes a heap profile with the four values of Go's. `sampling.period` is in bytes; `pprof -comments` shows `comment`.
pub fn heap(
    stacks: &[StackMemory],
    (mappings, sampling): (&[CodeMapping], SamplingWindow),
    (view, comment): (MemoryView, &str),
    symbols: impl Fn(u64) -> Vec<Symbol>,
) -> Profile {
    const TYPES: [(&str, &str); 4] =
        [("alloc_objects", "count"), ("alloc_space", "bytes"), ("inuse_objects", "count"), ("inuse_space", "bytes")];
    let mut encoder = Encoder::new(&TYPES, mappings, symbols);
    let mut samples = Vec::new();
    for StackMemory { frames, allocated, live } in stacks {
        let locations = encoder.locations(frames, ALLOCATOR_DEPTH);
        samples.push((locations, vec![allocated.0, allocated.1, live.0, live.1]));
    }
    let mut profile = encoder.finish(samples, ("space", "bytes"), sampling);
    let default = TYPES[if view == MemoryView::InUse { 3 } else { 1 }].0;
    let mut text = |text: &str| {
        profile.string_table.push(text.to_owned());
        i64::try_from(profile.string_table.len() - 1).unwrap_or(0)
    };
    let (default_sample_type, comment, drop_frames) = (text(default), text(comment), text(ALLOCATOR));
    Profile { default_sample_type, comment: vec![comment], drop_frames, ..profile }
}

/// Number of innermost frames among which the allocator's own are.
const ALLOCATOR_DEPTH: usize = 16;

/// Prefixes of the allocator's functions, for readers that resolve symbols themselves. pprof drops what such a function
/// calls, too: nothing that is below a thread (`__rust_try`) may match.
const ALLOCATOR: &str = "(_rjem_|tikv_jemallocator::|<tikv_jemallocator::|__rust_alloc|__rust_realloc|__rust_dealloc|__rustc::|alloc::alloc::|<alloc::alloc::|alloc::raw_vec::|<alloc::raw_vec::).*";

fn is_allocator(function: &str) -> bool {
    let prefixes = ALLOCATOR.trim_start_matches('(').trim_end_matches(").*").split('|');
    // Names of generic functions begin with their type.
    prefixes.into_iter().any(|prefix| function.trim_start_matches('_').starts_with(prefix.trim_start_matches('_')))
}

/// Estimates blocks and bytes from samples: a block of `bytes / blocks` is sampled with a probability that depends on its
/// size, at one sample per `interval` bytes.
pub fn estimate(blocks: u64, bytes: u64, interval: u64) -> (i64, i64) {
    if blocks == 0 || bytes == 0 {
        return (0, 0);
    }
    let (blocks, bytes) = (blocks as f64, bytes as f64);
    let factor = 1.0 / (1.0 - (-(bytes / blocks) / interval as f64).exp());
    ((blocks * factor) as i64, (bytes * factor) as i64)
}

/// Profile under construction, with the locations, functions, and strings in it by content.
struct Encoder<'a, S> {
    profile: Profile,
    strings: HashMap<String, i64>,
    locations: HashMap<u64, u64>,
    functions: HashMap<(String, String), u64>,
    mappings: &'a [CodeMapping],
    symbols: S,
}

impl<'a, S: Fn(u64) -> Vec<Symbol>> Encoder<'a, S> {
    fn new(types: &[(&str, &str)], mappings: &'a [CodeMapping], symbols: S) -> Self {
        let mut encoder = Self {
            profile: Profile::default(),
            strings: HashMap::new(),
            locations: HashMap::new(),
            functions: HashMap::new(),
            mappings,
            symbols,
        };
        encoder.string("");
        encoder.profile.sample_type = types.iter().map(|kind| encoder.value_type(*kind)).collect();
        for (id, mapping) in (1..).zip(mappings) {
            let filename = encoder.string(&mapping.file);
            encoder.profile.mapping.push(Mapping {
                id,
                memory_start: mapping.start,
                memory_limit: mapping.limit,
                file_offset: mapping.offset,
                filename,
                ..Mapping::default()
            });
        }
        encoder
    }

    /// Location IDs of a stack, without the allocator's frames, and those of their callees, among the `own` innermost ones.
    fn locations(&mut self, stack: &[u64], own: usize) -> Vec<u64> {
        // A return address is after its call.
        let call = |(depth, ip): (usize, &u64)| if depth == 0 { *ip } else { ip.saturating_sub(1) };
        let calls: Vec<u64> = stack.iter().enumerate().map(call).collect();
        // The outermost of inlined functions decides.
        let is_own = |ip: &u64| (self.symbols)(*ip).last().is_some_and(|symbol| is_allocator(&symbol.function));
        let skipped = calls.iter().take(own).rposition(is_own).map_or(0, |last| last + 1);
        calls.into_iter().skip(skipped).map(|ip| self.location(ip)).collect()
    }

    fn location(&mut self, address: u64) -> u64 {
        if let Some(id) = self.locations.get(&address) {
            return *id;
        }
        let id = self.locations.len() as u64 + 1;
        self.locations.insert(address, id);
        let at = self.mappings.iter().position(|mapping| (mapping.start..mapping.limit).contains(&address));
        let symbols = (self.symbols)(address);
        if let Some(mapping) = at.and_then(|at| self.profile.mapping.get_mut(at)) {
            mapping.has_functions |= !symbols.is_empty();
        }
        let line = symbols.into_iter().map(|symbol| self.line(symbol)).collect();
        let mapping_id = at.map_or(0, |at| at as u64 + 1);
        self.profile.location.push(Location { id, mapping_id, address, line, is_folded: false });
        id
    }

    fn line(&mut self, symbol: Symbol) -> Line {
        let (name, filename) = (self.string(&symbol.function), self.string(&symbol.file));
        let system_name = self.string(&symbol.linkage_name);
        let next = self.functions.len() as u64 + 1;
        let function_id = *self.functions.entry((symbol.function, symbol.file)).or_insert(next);
        if function_id == next {
            self.profile.function.push(Function { id: next, name, system_name, filename, start_line: 0 });
        }
        Line { function_id, line: symbol.line }
    }

    fn value_type(&mut self, (kind, unit): (&str, &str)) -> ValueType {
        ValueType { r#type: self.string(kind), unit: self.string(unit) }
    }

    /// Index in the string table.
    fn string(&mut self, text: &str) -> i64 {
        if let Some(at) = self.strings.get(text) {
            return *at;
        }
        let at = i64::try_from(self.strings.len()).unwrap_or(0);
        self.strings.insert(text.to_owned(), at);
        self.profile.string_table.push(text.to_owned());
        at
    }

    fn finish(mut self, samples: Vec<(Vec<u64>, Vec<i64>)>, period: (&str, &str), sampling: SamplingWindow) -> Profile {
        let sample = |(location_id, value)| Sample { location_id, value, label: vec![] };
        let mut sample: Vec<Sample> = samples.into_iter().map(sample).collect();
        sample.sort_by(|a, b| b.value.cmp(&a.value).then_with(|| a.location_id.cmp(&b.location_id)));
        let period_type = Some(self.value_type(period));
        let SamplingWindow { start: time_nanos, duration: duration_nanos, period } = sampling;
        Profile { sample, period_type, period, time_nanos, duration_nanos, ..self.profile }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_for_their_code() {
        let maps = "55a0-55b0 r--p 00000000 fe:01 1 /usr/bin/berth\n55b0-55c0 r-xp 00001000 fe:01 1 /usr/bin/berth\n\
                    7ff0-7ff8 r-xp 00000000 00:00 0 [vdso]\n8000-8001 r-xp 00000000 00:00 0\nnonsense\n";
        let berth = CodeMapping { start: 0x55b0, limit: 0x55c0, offset: 0x1000, file: "/usr/bin/berth".to_owned() };
        let found = mappings(maps);
        assert_eq!((found.len(), &found[0], found[1].file.as_str()), (2, &berth, "[vdso]"));
    }

    #[test]
    fn equal_stacks_are_one_sample_and_places_are_shared() {
        let mapped = [CodeMapping { start: 0x100, limit: 0x200, offset: 0, file: "berth".to_owned() }];
        let sampling = SamplingWindow { start: 1, duration: 2, period: 10 };
        let name = |address: u64| match address {
            0x110 => vec![Symbol {
                function: "<T>::leaf".to_owned(),
                linkage_name: "_R4leaf".to_owned(),
                file: "a.rs".to_owned(),
                line: 7,
            }],
            _ => vec![],
        };
        let profile = cpu(&[vec![0x110, 0x121], vec![0x110, 0x121], vec![0x300]], &mapped, sampling, name);
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
                0x10 => "_rjem_je_prof_backtrace",
                0x1f => "<tikv_jemallocator::Jemalloc as core::alloc::global::GlobalAlloc>::alloc",
                0x2f => "__rustc::__rust_alloc",
                0x3f => "alloc::alloc::alloc",
                _ => "reader",
            };
            vec![Symbol {
                function: function.to_owned(),
                linkage_name: String::new(),
                file: "a.rs".to_owned(),
                line: 1,
            }]
        };
        let noted = [StackMemory { frames: vec![0x10, 0x20, 0x30, 0x40, 0x50], allocated: (4, 40), live: (-1, -10) }];
        let sampling = SamplingWindow { start: 1, duration: 2, period: 512 };
        let profile = heap(&noted, (&[], sampling), (MemoryView::InUse, "so it is"), names);
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
            assert_eq!(estimate(blocks, bytes, 512 << 10), wanted, "{blocks} of {bytes}");
        }
    }
}
