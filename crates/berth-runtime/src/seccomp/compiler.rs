//! Compiles a seccomp profile to a classic BPF program. Pure.
//! Implements spec 09a §7.6.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    assembler::{AND, AT_LEAST, Assembler, EQUAL, GREATER, Instruction, LOAD, Position},
    machine::{CpuArchitecture, Section, X32},
    profile::{Argument, ProfileError, Rule, RuleCondition, SeccompProfile, action},
};

/// Maximum program length that the kernel accepts (`BPF_MAXINSNS`).
const LONGEST: usize = 4096;
const KILL_PROCESS: u32 = 0x8000_0000;
const NOT_IMPLEMENTED: u32 = 0x0005_0000 | 38;
/// `SECCOMP_RET_ERRNO`, and the mask of an action's kind.
const ERRNO: u32 = 0x0005_0000;
const KIND: u32 = 0xffff_0000;
/// Offsets of the call number, the architecture, and the 64-bit arguments in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;
const ARGUMENTS: usize = 6;
const FLAG_LOG: u32 = 1 << 1;
const FLAG_SPEC_ALLOW: u32 = 1 << 2;

/// Host and container properties that a profile's conditions depend on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conditions {
    /// CPU architecture.
    pub machine: CpuArchitecture,
    /// The container's bounding set, names without `CAP_`.
    pub capabilities: Vec<&'static str>,
    /// Major and minor version of the kernel.
    pub kernel: (u32, u32),
    /// Whether the kernel supports `SECCOMP_FILTER_FLAG_SPEC_ALLOW`.
    pub has_spec_allow: bool,
}

/// A compiled program with its flags.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Filter {
    /// Flags of `seccomp(2)`.
    pub flags: u32,
    /// The program.
    pub instructions: Vec<Instruction>,
}

impl Filter {
    /// The program in the kernel's layout: `sock_filter` records of 8 bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let record = |i: &Instruction| {
            let (code, k) = (i.code.to_ne_bytes(), i.k.to_ne_bytes());
            [code[0], code[1], i.jump_true, i.jump_false, k[0], k[1], k[2], k[3]]
        };
        self.instructions.iter().flat_map(record).collect()
    }
}

/// Rules of one system call; the first match applies.
type Chain<'a> = Vec<(&'a [Argument], u32)>;

/// Compiles a profile.
///
/// # Errors
/// The profile contains an unknown action, operator, argument, flag, or kernel version, or the program becomes too
/// long.
pub fn compile(profile: &SeccompProfile, on: &Conditions) -> Result<Filter, ProfileError> {
    let default = action(&profile.default_action, profile.default_errno_ret)?;
    let mut rules = Vec::new();
    for rule in &profile.syscalls {
        check(rule)?;
        let action = action(&rule.action, rule.errno_ret)?;
        if all_hold(&rule.includes, on)? && !any_holds(&rule.excludes, on)? {
            rules.push((rule, action));
        }
    }
    let wanted = sections(profile, on.machine);
    let mut asm = Assembler::default();
    let mut starts = BTreeMap::new();
    for &section in on.machine.sections().iter().filter(|section| wanted.contains(section)) {
        starts.insert(section, section_program(&mut asm, section, &rules, default));
    }
    let start = dispatch(&mut asm, on.machine, &starts);
    let instructions = asm.program(start);
    if instructions.len() > LONGEST {
        return Err(ProfileError(format!("program has {} instructions, more than {LONGEST}", instructions.len())));
    }
    Ok(Filter { flags: flags(profile, on)?, instructions })
}

/// The permitted architectures: those of the profile's list, the sub-architectures of the machine's, or all that its
/// kernel runs; the machine's own is always included.
fn sections(profile: &SeccompProfile, machine: CpuArchitecture) -> BTreeSet<Section> {
    let all = machine.sections();
    let own = all.first().copied();
    let beside = profile.arch_map.iter().find(|a| own.is_some_and(|own| own.name() == a.architecture));
    let named: Option<&[String]> = match (profile.architectures.is_empty(), beside) {
        (false, _) => Some(&profile.architectures),
        (true, Some(beside)) => Some(&beside.sub_architectures),
        (true, None) => None,
    };
    let is_named = |section: &Section| named.is_none_or(|names| names.iter().any(|name| name == section.name()));
    all.iter().copied().filter(is_named).chain(own).collect()
}

fn flags(profile: &SeccompProfile, on: &Conditions) -> Result<u32, ProfileError> {
    let spec_allow = if on.has_spec_allow { FLAG_SPEC_ALLOW } else { 0 };
    let Some(names) = &profile.flags else { return Ok(spec_allow) };
    names.iter().try_fold(0, |flags, name| match name.as_str() {
        // The process has one thread when the filter is installed.
        "SECCOMP_FILTER_FLAG_TSYNC" => Ok(flags),
        "SECCOMP_FILTER_FLAG_LOG" => Ok(flags | FLAG_LOG),
        "SECCOMP_FILTER_FLAG_SPEC_ALLOW" => Ok(flags | spec_allow),
        other => Err(ProfileError(format!("unknown flag {other:?}"))),
    })
}

/// Whether every part of a condition holds.
fn all_hold(condition: &RuleCondition, on: &Conditions) -> Result<bool, ProfileError> {
    let is_kernel = condition.min_kernel.as_deref().map_or(Ok(true), |least| is_at_least(on.kernel, least))?;
    let is_machine = condition.arches.is_empty() || condition.arches.iter().any(|name| name == on.machine.name());
    Ok(is_kernel && is_machine && condition.caps.iter().all(|name| has(on, name)))
}

/// Whether any part of a condition holds.
fn any_holds(condition: &RuleCondition, on: &Conditions) -> Result<bool, ProfileError> {
    let is_kernel = condition.min_kernel.as_deref().map_or(Ok(false), |least| is_at_least(on.kernel, least))?;
    let is_machine = condition.arches.iter().any(|name| name == on.machine.name());
    Ok(is_kernel || is_machine || condition.caps.iter().any(|name| has(on, name)))
}

fn has(on: &Conditions, name: &str) -> bool {
    let upper = name.to_ascii_uppercase();
    let bare = upper.strip_prefix("CAP_").unwrap_or(&upper);
    on.capabilities.contains(&bare)
}

fn is_at_least(kernel: (u32, u32), least: &str) -> Result<bool, ProfileError> {
    let mut numbers = least.split('.').map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok(kernel >= (major, minor)),
        _ => Err(ProfileError(format!("invalid kernel version {least:?}"))),
    }
}

fn check(rule: &Rule) -> Result<(), ProfileError> {
    for arg in &rule.args {
        if arg.index >= ARGUMENTS {
            return Err(ProfileError(format!("invalid argument index {}", arg.index)));
        }
        let known = ["NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"];
        if !arg.op.strip_prefix("SCMP_CMP_").is_some_and(|op| known.contains(&op)) {
            return Err(ProfileError(format!("unknown operation {:?}", arg.op)));
        }
    }
    Ok(())
}

/// Selects the section by architecture, on x86-64 also by the x32 bit. Kills the process for any other architecture.
fn dispatch(asm: &mut Assembler, machine: CpuArchitecture, starts: &BTreeMap<Section, Position>) -> Position {
    let mut otherwise = asm.finish(KILL_PROCESS);
    for &section in machine.sections().iter().rev().filter(|section| **section != Section::X32) {
        let Some(&start) = starts.get(&section) else { continue };
        let tree = match section {
            Section::X86_64 => {
                let killed = asm.finish(KILL_PROCESS);
                let x32 = starts.get(&Section::X32).copied().unwrap_or(killed);
                asm.test(AT_LEAST, X32, x32, start)
            }
            _ => start,
        };
        let numbered = asm.then(LOAD, NUMBER_AT, tree);
        otherwise = asm.test(EQUAL, section.audit(), numbered, otherwise);
    }
    asm.then(LOAD, ARCHITECTURE_AT, otherwise)
}

/// The decision tree of one section; expects the call number to be loaded.
fn section_program(asm: &mut Assembler, section: Section, rules: &[(&Rule, u32)], default: u32) -> Position {
    let calls = section.calls();
    let mut chains: BTreeMap<u32, Chain<'_>> = BTreeMap::new();
    for (rule, action) in rules {
        let names = rule.names.iter().chain((!rule.name.is_empty()).then_some(&rule.name));
        for number in names.filter_map(|name| calls.get(name.as_str())) {
            chains.entry(*number).or_default().push((&rule.args, *action));
        }
    }
    let newest = section.newest();
    let unknown = if default & KIND == ERRNO { NOT_IMPLEMENTED } else { default };
    let mut ranges: Vec<(u32, Position)> = Vec::new();
    let mut next = 0;
    let mut add = |asm: &mut Assembler, from: u32, actions: &Chain<'_>, default: u32| {
        let place = chain(asm, actions, default);
        if ranges.last().is_none_or(|(_, last)| *last != place) {
            ranges.push((from, place));
        }
    };
    for (number, actions) in &chains {
        if *number > next {
            let beyond = next > newest;
            add(asm, next, &Vec::new(), if beyond { unknown } else { default });
            if !beyond && *number > newest.saturating_add(1) {
                add(asm, newest.saturating_add(1), &Vec::new(), unknown);
            }
        }
        add(asm, *number, actions, default);
        next = number.saturating_add(1);
    }
    if next <= newest {
        add(asm, next, &Vec::new(), default);
    }
    add(asm, next.max(newest.saturating_add(1)), &Vec::new(), unknown);
    tree(asm, &ranges)
}

/// Binary search over ranges of call numbers, each given by its first number; the first range begins at 0.
fn tree(asm: &mut Assembler, ranges: &[(u32, Position)]) -> Position {
    match ranges {
        [] => asm.finish(KILL_PROCESS),
        [(_, place)] => *place,
        _ => {
            let (low, high) = ranges.split_at(ranges.len() / 2);
            let first = high.first().map_or(0, |(first, _)| *first);
            let (high, low) = (tree(asm, high), tree(asm, low));
            asm.test(AT_LEAST, first, high, low)
        }
    }
}

/// Evaluates the rules of one call, in order.
fn chain(asm: &mut Assembler, rules: &Chain<'_>, default: u32) -> Position {
    let whole = rules.iter().position(|(args, _)| args.is_empty());
    let last = whole.and_then(|at| rules.get(at)).map_or(default, |(_, action)| *action);
    let mut otherwise = asm.finish(last);
    for (args, action) in rules.iter().take(whole.unwrap_or(rules.len())).rev() {
        let mut fits = asm.finish(*action);
        for arg in args.iter().rev() {
            fits = compare(asm, arg, fits, otherwise);
        }
        otherwise = fits;
    }
    otherwise
}

/// Compares a 64-bit argument. All supported machines are little-endian.
fn compare(asm: &mut Assembler, arg: &Argument, yes: Position, no: Position) -> Position {
    let low_at = ARGUMENTS_AT + 8 * u32::try_from(arg.index).unwrap_or_default();
    let high_at = low_at + 4;
    let halves = |value: u64| {
        let low = u32::try_from(value & u64::from(u32::MAX)).unwrap_or_default();
        (u32::try_from(value >> 32).unwrap_or_default(), low)
    };
    let (high, low) = halves(arg.value);
    let ordered = |asm: &mut Assembler, code: u16, yes: Position, no: Position| {
        let lower = asm.test(code, low, yes, no);
        let lower = asm.then(LOAD, low_at, lower);
        let equal = asm.test(EQUAL, high, lower, no);
        let greater = asm.test(GREATER, high, yes, equal);
        asm.then(LOAD, high_at, greater)
    };
    match arg.op.as_str() {
        "SCMP_CMP_GT" => ordered(asm, GREATER, yes, no),
        "SCMP_CMP_GE" => ordered(asm, AT_LEAST, yes, no),
        "SCMP_CMP_LE" => ordered(asm, GREATER, no, yes),
        "SCMP_CMP_LT" => ordered(asm, AT_LEAST, no, yes),
        "SCMP_CMP_MASKED_EQ" => {
            let (left_high, left_low) = halves(arg.value_two);
            let lower = asm.test(EQUAL, left_low, yes, no);
            let lower = asm.then(AND, low, lower);
            let lower = asm.then(LOAD, low_at, lower);
            let upper = asm.test(EQUAL, left_high, lower, no);
            let upper = asm.then(AND, high, upper);
            asm.then(LOAD, high_at, upper)
        }
        op => {
            let (yes, no) = if op == "SCMP_CMP_NE" { (no, yes) } else { (yes, no) };
            let lower = asm.test(EQUAL, low, yes, no);
            let lower = asm.then(LOAD, low_at, lower);
            let upper = asm.test(EQUAL, high, lower, no);
            asm.then(LOAD, high_at, upper)
        }
    }
}
