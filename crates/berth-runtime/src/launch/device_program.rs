//! BPF cgroup device program that enforces device access rules on cgroup v2. Pure.
//!
//! The kernel runs it for every access and passes the device type, the kind of access, and the device numbers. Later
//! rules override earlier ones, so the program tests the last rule first. Implements spec 09a §8.4, §9.4.

use super::devices::Rule;

/// `BPF_DEVCG_DEV_*`.
const BLOCK: i32 = 1;
const CHARACTER: i32 = 2;
/// `BPF_DEVCG_ACC_*`.
const MAKE: i32 = 1;
const READ: i32 = 2;
const WRITE: i32 = 4;
const EVERYTHING: i32 = MAKE | READ | WRITE;

/// BPF registers: return value, context pointer from the kernel, device type, access, major and minor number.
const ANSWER: u8 = 0;
const CONTEXT: u8 = 1;
const KIND: u8 = 2;
const ACCESS: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;

/// The BPF instructions, in the machine's byte order.
pub fn device_program(rules: &[Rule]) -> Vec<u64> {
    let mut all = vec![
        load(KIND, CONTEXT, 0),
        instruction(0x54, KIND, 0, 0, 0xffff),
        load(ACCESS, CONTEXT, 0),
        instruction(0x74, ACCESS, 0, 0, 16),
        load(MAJOR, CONTEXT, 4),
        load(MINOR, CONTEXT, 8),
    ];
    for rule in rules.iter().rev() {
        let tests = tests(rule);
        let mut left = tests.len() + 2;
        for test in &tests {
            left -= 1;
            all.push(test.encoded(left));
        }
        all.extend(answer(rule.is_allowed));
        if tests.is_empty() {
            return all; // this rule matches every device: earlier rules are unreachable
        }
    }
    all.extend(answer(false));
    all
}

/// One test of a rule: on failure, the program skips the rest of the rule.
enum Test {
    /// The register must have this value.
    Is(u8, i32),
    /// Masks the requested access with these bits.
    Keep(i32),
    /// The masked access must equal the requested access.
    IsKept,
}

impl Test {
    fn encoded(&self, to_skip: usize) -> u64 {
        let skip = i16::try_from(to_skip).unwrap_or(i16::MAX); // at most eight
        match *self {
            Self::Is(register, value) => instruction(0x55, register, 0, skip, value),
            // Move and mask are one 32-bit instruction each; the context register is no longer needed here.
            Self::Keep(bits) if bits < 0 => instruction(0xbc, CONTEXT, ACCESS, 0, 0),
            Self::Keep(bits) => instruction(0x54, CONTEXT, 0, 0, bits),
            Self::IsKept => instruction(0x5d, CONTEXT, ACCESS, skip, 0),
        }
    }
}

fn tests(rule: &Rule) -> Vec<Test> {
    let mut all = Vec::new();
    match rule.kind {
        'b' => all.push(Test::Is(KIND, BLOCK)),
        'c' => all.push(Test::Is(KIND, CHARACTER)),
        _ => return all,
    }
    let bit = |letter: char| match letter {
        'r' => READ,
        'w' => WRITE,
        'm' => MAKE,
        _ => 0,
    };
    let access = rule.access.chars().fold(0, |all, letter| all | bit(letter));
    if access != EVERYTHING {
        all.extend([Test::Keep(-1), Test::Keep(access), Test::IsKept]);
    }
    let number = |n: u32| i32::try_from(n).unwrap_or(i32::MAX); // the kernel's numbers have at most 20 bits
    all.extend(rule.major.map(|n| Test::Is(MAJOR, number(n))));
    all.extend(rule.minor.map(|n| Test::Is(MINOR, number(n))));
    all
}

fn answer(is_allowed: bool) -> [u64; 2] {
    [instruction(0xb7, ANSWER, 0, 0, i32::from(is_allowed)), instruction(0x95, 0, 0, 0, 0)]
}

fn load(to: u8, from: u8, offset: i16) -> u64 {
    instruction(0x61, to, from, offset, 0)
}

/// Encodes a `struct bpf_insn`; the order of its two 4-bit fields is that of a little-endian machine.
fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    let (offset, value) = (offset.to_ne_bytes(), value.to_ne_bytes());
    u64::from_ne_bytes([code, to | (from << 4), offset[0], offset[1], value[0], value[1], value[2], value[3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::devices::{DeviceInputs, rules};

    /// Interprets a program as the kernel does.
    fn decide(program: &[u64], kind: i32, access: i32, numbers: (i32, i32)) -> bool {
        let mut registers = [0_i64; 11];
        let context = [kind | (access << 16), numbers.0, numbers.1];
        let mut at = 0;
        loop {
            let bytes = program[at].to_ne_bytes();
            let (to, from) = (usize::from(bytes[1] & 15), usize::from(bytes[1] >> 4));
            let offset = i16::from_ne_bytes([bytes[2], bytes[3]]);
            let value = i64::from(i32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]));
            at += 1;
            let mut skip_if = |test: bool| at += if test { usize::try_from(offset).expect("forward") } else { 0 };
            match bytes[0] {
                0x61 => registers[to] = i64::from(context[usize::try_from(offset).expect("a field") / 4]),
                0x54 => registers[to] &= value,
                0x74 => registers[to] >>= value,
                0xbc => registers[to] = registers[from],
                0xb7 => registers[to] = value,
                0x55 => skip_if(registers[to] != value),
                0x5d => skip_if(registers[to] != registers[from]),
                0x95 => return registers[0] != 0,
                code => panic!("unknown instruction {code:#x}"),
            }
        }
    }

    fn wanted(host: Option<&'static [crate::launch::inputs::LinuxDevice]>) -> DeviceInputs<'static> {
        DeviceInputs { nodes: &[], host, owner: None, has_own_dev: true, terminal: true }
    }

    #[test]
    fn the_usual_devices_may_be_used_and_others_made() {
        let mut all = rules(&wanted(None));
        all.push(Rule { is_allowed: true, kind: 'b', major: Some(8), minor: None, access: "r".to_owned() });
        let program = device_program(&all);
        for (kind, access, numbers, expected) in [
            (CHARACTER, READ | WRITE, (1, 3), true),
            (CHARACTER, READ, (5, 1), true),
            (CHARACTER, WRITE, (136, 17), true),
            (CHARACTER, READ, (1, 1), false),
            (CHARACTER, MAKE, (1, 1), true),
            (CHARACTER, MAKE | READ, (1, 1), false),
            (CHARACTER, READ, (10, 229), false),
            (BLOCK, MAKE, (7, 0), true),
            (BLOCK, READ, (8, 3), true),
            (BLOCK, READ | WRITE, (8, 3), false),
            (BLOCK, WRITE, (8, 3), false),
            (BLOCK, READ, (1, 3), false),
        ] {
            assert_eq!(decide(&program, kind, access, numbers), expected, "{kind} {access} {numbers:?}");
        }
    }

    #[test]
    fn privileged_containers_may_use_all() {
        let program = device_program(&rules(&wanted(Some(&[]))));
        assert!(decide(&program, BLOCK, EVERYTHING, (8, 0)));
        assert!(!decide(&device_program(&[]), CHARACTER, READ, (1, 3)));
    }

    /// The kernel's verifier accepts the program, and the kernel enforces it.
    #[test]
    fn the_kernel_takes_the_program() {
        use std::{fs, os::fd::AsFd, process::Command};

        use berth_sys::{device_filter, mount_table};

        let mounts = mount_table::read().expect("a table");
        let unified = mounts.iter().find(|mount| mount.kind == "cgroup2").map(|mount| mount.target.clone());
        let Some(unified) = unified.filter(|_| nix::unistd::geteuid().is_root()) else {
            return println!("skipped: needs root and the unified hierarchy");
        };
        let path = unified.join(format!("berth-program-{}", std::process::id()));
        if let Err(error) = fs::create_dir(&path) {
            return println!("skipped: needs root to make control groups: {error}");
        }
        let group = fs::File::open(&path).expect("a directory");
        let replaced = device_filter::replace(group.as_fd(), &device_program(&rules(&wanted(None))));
        let script = format!(
            "echo $$ > {}/cgroup.procs; head -c 1 /dev/zero | wc -c; head -c 1 /dev/kmsg 2>&1 >/dev/null",
            path.display()
        );
        let output = Command::new("/bin/sh").args(["-c", &script]).output();
        fs::remove_dir(&path).expect("an empty group");
        replaced.expect("a program");
        let text = String::from_utf8(output.expect("a shell").stdout).expect("text");
        assert!(text.starts_with("1\n") && text.contains("Operation not permitted"), "{text}");
    }
}
