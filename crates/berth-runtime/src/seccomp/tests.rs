//! Property tests of compiled programs against their rules, and tests of the built-in profile.

use std::{collections::BTreeMap, sync::LazyLock};

use proptest::prelude::*;

use super::{
    assembler::{AND, AT_LEAST, EQUAL, GREATER, JUMP, LOAD, RETURN},
    machine::X32,
    profile::{Argument, Rule, action},
    *,
};

const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;

fn errno(number: u32) -> u32 {
    0x0005_0000 | number
}

/// A system call as the kernel passes it to a filter.
#[derive(Clone, Copy, Debug)]
struct Call {
    architecture: u32,
    number: u32,
    args: [u64; 6],
}

/// Interprets a program as the kernel does.
fn execute(program: &[Instruction], call: &Call) -> u32 {
    let data = |at: u32| match at {
        0 => call.number,
        4 => call.architecture,
        at => {
            let whole = call.args[(at as usize - 16) / 8];
            if at % 8 == 0 { whole as u32 } else { (whole >> 32) as u32 }
        }
    };
    let (mut at, mut value) = (0, 0);
    loop {
        let i = program[at];
        at += 1;
        let mut jump = |test: bool| at += usize::from(if test { i.jump_true } else { i.jump_false });
        match i.code {
            LOAD => value = data(i.k),
            AND => value &= i.k,
            EQUAL => jump(value == i.k),
            GREATER => jump(value > i.k),
            AT_LEAST => jump(value >= i.k),
            JUMP => at += i.k as usize,
            RETURN => return i.k,
            code => panic!("unknown instruction {code:#x}"),
        }
    }
}

fn conditions(machine: CpuArchitecture, capabilities: &[&'static str]) -> Conditions {
    Conditions { machine, capabilities: capabilities.to_vec(), kernel: (6, 12), has_spec_allow: true }
}

/// Call numbers of a section, and its newest number.
type Table = (BTreeMap<&'static str, u32>, u32);

static TABLES: LazyLock<BTreeMap<Section, Table>> = LazyLock::new(|| {
    let sections = [CpuArchitecture::X86_64, CpuArchitecture::Aarch64, CpuArchitecture::Riscv64]
        .map(CpuArchitecture::sections)
        .concat();
    sections.into_iter().map(|section| (section, (section.calls(), section.newest()))).collect()
});

/// Evaluates the rules directly, without a program.
fn evaluate(profile: &SeccompProfile, machine: CpuArchitecture, call: &Call) -> u32 {
    let is_x32 = call.architecture == Section::X86_64.audit() && call.number >= X32;
    let of_call = |s: &&Section| s.audit() == call.architecture && (**s == Section::X32) == is_x32;
    let Some(section) = machine.sections().iter().find(of_call) else { return KILL_PROCESS };
    let (calls, newest) = &TABLES[section];
    for rule in &profile.syscalls {
        let is_named = rule.names.iter().any(|name| calls.get(name.as_str()) == Some(&call.number));
        if is_named && rule.args.iter().all(|arg| fits(arg, call.args[arg.index])) {
            return action(&rule.action, rule.errno_ret).expect("an action");
        }
    }
    let default = action(&profile.default_action, profile.default_errno_ret).expect("an action");
    // Beyond the newest number are only x32's own variants and Arm's private calls, and the table contains those.
    let is_ruled = |n: &str| profile.syscalls.iter().any(|rule| rule.names.iter().any(|name| name == n));
    let is_new = call.number > *newest && !calls.iter().any(|(name, number)| *number == call.number && is_ruled(name));
    if is_new && default & 0xffff_0000 == errno(0) { errno(38) } else { default }
}

fn fits(arg: &Argument, value: u64) -> bool {
    match arg.op.as_str() {
        "SCMP_CMP_NE" => value != arg.value,
        "SCMP_CMP_LT" => value < arg.value,
        "SCMP_CMP_LE" => value <= arg.value,
        "SCMP_CMP_EQ" => value == arg.value,
        "SCMP_CMP_GE" => value >= arg.value,
        "SCMP_CMP_GT" => value > arg.value,
        _ => value & arg.value == arg.value_two,
    }
}

fn values() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..4, Just(u64::MAX), Just(1 << 32), Just((1 << 32) | 1), Just(u64::from(u32::MAX)), any::<u64>()]
}

fn arguments() -> impl Strategy<Value = Argument> {
    let ops = ["NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"];
    (0_usize..6, values(), values(), 0..ops.len()).prop_map(move |(index, value, value_two, op)| Argument {
        index,
        value,
        value_two,
        op: format!("SCMP_CMP_{}", ops[op]),
    })
}

fn machines() -> impl Strategy<Value = CpuArchitecture> {
    prop_oneof![Just(CpuArchitecture::X86_64), Just(CpuArchitecture::Aarch64), Just(CpuArchitecture::Riscv64)]
}

fn rules() -> impl Strategy<Value = Rule> {
    let names = ["read", "write", "openat", "clone", "clone3", "statx", "set_tls", "ioctl", "file_setattr", "nothing"];
    let actions = ["SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO", "SCMP_ACT_KILL", "SCMP_ACT_TRAP", "SCMP_ACT_LOG"];
    let names = proptest::sample::subsequence(names.to_vec(), 1..5);
    (names, 0..actions.len(), 1_u32..200, proptest::collection::vec(arguments(), 0..4)).prop_map(
        move |(names, action, errno, args)| Rule {
            names: names.into_iter().map(str::to_owned).collect(),
            action: actions[action].to_owned(),
            errno_ret: Some(errno),
            args,
            ..Rule::default()
        },
    )
}

fn profiles() -> impl Strategy<Value = SeccompProfile> {
    let defaults = prop_oneof![Just("SCMP_ACT_ALLOW"), Just("SCMP_ACT_ERRNO"), Just("SCMP_ACT_KILL_PROCESS")];
    (defaults, proptest::collection::vec(rules(), 0..12)).prop_map(|(default, syscalls)| SeccompProfile {
        default_action: default.to_owned(),
        default_errno_ret: None,
        architectures: Vec::new(),
        arch_map: Vec::new(),
        flags: None,
        syscalls,
    })
}

/// Call numbers at and around the edges of the rules, with and without the x32 bit.
fn numbers() -> Vec<u32> {
    let all = [Section::X86_64, Section::I386, Section::Aarch64, Section::Arm, Section::Riscv64];
    let mut numbers: Vec<u32> = vec![0, 468, 469, 470, 471, 512, 547, 548, 4096, 0xf0000, u32::MAX, X32 - 1];
    for section in all {
        let calls = section.calls();
        let near = ["read", "write", "openat", "clone", "clone3", "statx", "set_tls", "ioctl"];
        for number in near.iter().filter_map(|name| calls.get(name)) {
            numbers.extend([number.saturating_sub(1), *number, number + 1]);
        }
    }
    let marked: Vec<u32> = numbers.iter().map(|number| number | X32).collect();
    numbers.extend(marked);
    numbers
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_filter_decides_as_its_profile_does(
        machine in machines(),
        profile in profiles(),
        args in proptest::array::uniform6(values()),
    ) {
        let filter = compile(&profile, &conditions(machine, &[])).expect("a program");
        let sections = [Section::X86_64, Section::I386, Section::Aarch64, Section::Arm, Section::Riscv64];
        for architecture in sections.map(Section::audit).into_iter().chain([0, u32::MAX]) {
            for number in numbers() {
                let call = Call { architecture, number, args };
                prop_assert_eq!(execute(&filter.instructions, &call), evaluate(&profile, machine, &call), "{:?}", call);
            }
        }
    }

    #[test]
    fn odd_text_is_refused_without_panic(text in "\\PC{0,200}") {
        let _refused = SeccompProfile::parse(text.as_bytes());
    }
}

/// A program with more calls than a conditional jump can skip.
#[test]
fn long_programs_jump_far() {
    let calls = Section::X86_64.calls();
    let rule = |(index, name): (usize, &&str)| Rule {
        names: vec![(*name).to_owned()],
        action: "SCMP_ACT_ERRNO".to_owned(),
        errno_ret: Some(u32::try_from(index).expect("few") + 1),
        args: vec![Argument { index: 0, value: index as u64, value_two: 0, op: "SCMP_CMP_GE".to_owned() }],
        ..Rule::default()
    };
    let profile = SeccompProfile {
        default_action: "SCMP_ACT_ALLOW".to_owned(),
        default_errno_ret: None,
        architectures: vec!["SCMP_ARCH_X86_64".to_owned()],
        arch_map: Vec::new(),
        flags: None,
        syscalls: calls.keys().enumerate().map(rule).collect(),
    };
    let filter = compile(&profile, &conditions(CpuArchitecture::X86_64, &[])).expect("a program");
    assert!(filter.instructions.len() > 2 * calls.len());
    for args in [[0; 6], [200; 6], [500; 6], [1 << 40; 6]] {
        for number in 0..500 {
            let call = Call { architecture: Section::X86_64.audit(), number, args };
            assert_eq!(
                execute(&filter.instructions, &call),
                evaluate(&profile, CpuArchitecture::X86_64, &call),
                "{call:?}"
            );
        }
    }
    let mut too_long = profile.clone();
    for rule in &mut too_long.syscalls {
        rule.args = (0..6)
            .flat_map(|index| (0..2).map(move |n| Argument { index, value: n, value_two: 0, op: "SCMP_CMP_NE".into() }))
            .enumerate()
            .map(|(n, arg)| Argument { value: rule.errno_ret.map_or(0, u64::from) * 100 + n as u64, ..arg })
            .collect();
    }
    assert!(compile(&too_long, &conditions(CpuArchitecture::X86_64, &[])).is_err());
}

fn built_in(machine: CpuArchitecture, capabilities: &[&'static str]) -> Filter {
    let profile = SeccompProfile::parse(DEFAULT_PROFILE.as_bytes()).expect("a profile");
    compile(&profile, &conditions(machine, capabilities)).expect("a program")
}

fn answers(filter: &Filter, section: Section, name: &str, first: u64) -> u32 {
    let number = *section.calls().get(name).unwrap_or_else(|| panic!("{name}"));
    let call = Call { architecture: section.audit(), number, args: [first, 0, 0, 0, 0, 0] };
    execute(&filter.instructions, &call)
}

#[test]
fn the_built_in_profile_answers_as_specified() {
    let no = errno(1);
    for (name, first, plain, admin) in [
        ("read", 0, ALLOW, ALLOW),
        ("openat2", 0, ALLOW, ALLOW),
        ("mount", 0, no, ALLOW),
        ("unshare", 0, no, ALLOW),
        ("clone", 0x11, ALLOW, ALLOW),
        ("clone", 0x1000_0000, no, ALLOW),
        ("clone3", 0, errno(38), ALLOW),
        ("socket", 2, ALLOW, ALLOW),
        ("socket", 38, no, no),
        ("socket", 39, ALLOW, ALLOW),
        ("socket", 40, no, no),
        ("socket", (1 << 32) | 40, no, no),
        ("socket", 41, ALLOW, ALLOW),
        ("personality", 0, ALLOW, ALLOW),
        ("personality", 0x20008, ALLOW, ALLOW),
        ("personality", 0x40000, no, no),
        ("io_uring_setup", 0, no, no),
        ("userfaultfd", 0, no, no),
        ("keyctl", 0, no, no),
        ("kexec_load", 0, no, no),
        ("swapon", 0, no, no),
        ("arch_prctl", 0, ALLOW, ALLOW),
        ("reboot", 0, no, no),
    ] {
        let filter = built_in(CpuArchitecture::X86_64, &[]);
        assert_eq!(answers(&filter, Section::X86_64, name, first), plain, "{name} {first:#x}");
        let filter = built_in(CpuArchitecture::X86_64, &["SYS_ADMIN"]);
        assert_eq!(answers(&filter, Section::X86_64, name, first), admin, "{name} {first:#x} with SYS_ADMIN");
    }
    let filter = built_in(CpuArchitecture::X86_64, &["SYS_CHROOT", "SYS_TIME", "BPF", "SYSLOG"]);
    for (name, expected) in [("chroot", ALLOW), ("clock_settime", ALLOW), ("bpf", ALLOW), ("setns", no)] {
        assert_eq!(answers(&filter, Section::X86_64, name, 0), expected, "{name}");
    }
    assert_eq!(answers(&filter, Section::I386, "stime", 0), ALLOW);
    assert_eq!(answers(&filter, Section::X32, "read", 0), ALLOW);
    assert_eq!(answers(&filter, Section::X32, "mount", 0), no);
    let filter = built_in(CpuArchitecture::Aarch64, &[]);
    assert_eq!(answers(&filter, Section::Arm, "set_tls", 0), ALLOW);
    assert_eq!(answers(&filter, Section::Aarch64, "read", 0), ALLOW);
    let filter = built_in(CpuArchitecture::Riscv64, &[]);
    assert_eq!(answers(&filter, Section::Riscv64, "riscv_hwprobe", 0), ALLOW);
}

#[test]
fn calls_newer_than_the_tables_do_not_exist() {
    // AC-09a-X17
    for machine in [CpuArchitecture::X86_64, CpuArchitecture::Aarch64, CpuArchitecture::Riscv64] {
        let filter = built_in(machine, &[]);
        for section in machine.sections() {
            let call = |number| Call { architecture: section.audit(), number, args: [0; 6] };
            let newest = section.newest();
            assert_eq!(execute(&filter.instructions, &call(newest)), errno(1), "{section:?}");
            assert_eq!(execute(&filter.instructions, &call(newest + 1)), errno(38), "{section:?}");
        }
        let other = Call { architecture: 0x1234, number: 0, args: [0; 6] };
        assert_eq!(execute(&filter.instructions, &other), KILL_PROCESS);
        assert!(filter.instructions.len() < 1024, "{} instructions", filter.instructions.len());
        assert_eq!((filter.flags, filter.bytes().len()), (4, filter.instructions.len() * 8));
    }
}

#[test]
fn profiles_of_others_are_understood() {
    let check = |text: &str, name: &str, expected: Result<u32, &str>| {
        let got = SeccompProfile::parse(text.as_bytes())
            .and_then(|profile| compile(&profile, &conditions(CpuArchitecture::X86_64, &["SYS_ADMIN"])));
        let got = got.map(|filter| answers(&filter, Section::X86_64, name, 0)).map_err(|error| error.0);
        assert_eq!(got, expected.map_err(str::to_owned), "{text}");
    };
    let with = |rule: &str| format!("{{\"defaultAction\": \"SCMP_ACT_ALLOW\", \"syscalls\": [{rule}]}}");
    check(&with(r#"{"names": ["sethostname"], "action": "SCMP_ACT_ERRNO"}"#), "sethostname", Ok(errno(1)));
    check(&with(r#"{"name": "read", "action": "SCMP_ACT_ERRNO", "errnoRet": 7, "args": null}"#), "read", Ok(errno(7)));
    check(&with(r#"{"names": null, "action": "SCMP_ACT_KILL"}"#), "read", Ok(ALLOW));
    let included =
        r#"{"names": ["read"], "action": "SCMP_ACT_TRAP", "includes": {"caps": ["CAP_SYS_ADMIN"]}, "excludes": null}"#;
    check(&with(included), "read", Ok(0x0003_0000));
    let excluded = r#"{"names": ["read"], "action": "SCMP_ACT_TRAP", "excludes": {"caps": ["CAP_SYS_ADMIN"]}}"#;
    check(&with(excluded), "read", Ok(ALLOW));
    let newer = r#"{"names": ["read"], "action": "SCMP_ACT_TRAP", "includes": {"minKernel": "99.1"}}"#;
    check(&with(newer), "read", Ok(ALLOW));
    let older =
        r#"{"names": ["read"], "action": "SCMP_ACT_LOG", "includes": {"minKernel": "4.8", "arches": ["amd64"]}}"#;
    check(&with(older), "read", Ok(0x7ffc_0000));
    check(
        &with(r#"{"names": ["read"], "action": "SCMP_ACT_NOTIFY"}"#),
        "read",
        Err("action SCMP_ACT_NOTIFY is not supported"),
    );
    check(&with(r#"{"names": ["read"], "action": "X"}"#), "read", Err("unknown action \"X\""));
    let odd =
        r#"{"names": ["read"], "action": "SCMP_ACT_LOG", "args": [{"index": 6, "value": 1, "op": "SCMP_CMP_EQ"}]}"#;
    check(&with(odd), "read", Err("invalid argument index 6"));
    let odd = r#"{"names": ["read"], "action": "SCMP_ACT_LOG", "args": [{"index": 0, "value": 1, "op": "EQ"}]}"#;
    check(&with(odd), "read", Err("unknown operation \"EQ\""));
    let flags = r#"{"defaultAction": "SCMP_ACT_ALLOW", "flags": ["SECCOMP_FILTER_FLAG_LOG"]}"#;
    let flags =
        SeccompProfile::parse(flags.as_bytes()).and_then(|p| compile(&p, &conditions(CpuArchitecture::X86_64, &[])));
    assert_eq!(flags.map(|filter| filter.flags), Ok(2));
}

#[test]
fn architectures_that_are_not_named_are_killed() {
    let of = |text: &str| {
        let profile = SeccompProfile::parse(text.as_bytes()).expect("a profile");
        let filter = compile(&profile, &conditions(CpuArchitecture::X86_64, &[])).expect("a program");
        [Section::X86_64, Section::I386, Section::X32].map(|section| answers(&filter, section, "read", 0))
    };
    let all = r#"{"defaultAction": "SCMP_ACT_ALLOW"}"#;
    assert_eq!(of(all), [ALLOW, ALLOW, ALLOW]);
    let one = r#"{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_S390"]}"#;
    assert_eq!(of(one), [ALLOW, KILL_PROCESS, KILL_PROCESS]);
    let two = r#"{"defaultAction": "SCMP_ACT_ALLOW",
        "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}]}"#;
    assert_eq!(of(two), [ALLOW, ALLOW, KILL_PROCESS]);
}

#[test]
fn the_built_in_profile_names_what_exists() {
    let profile = SeccompProfile::parse(DEFAULT_PROFILE.as_bytes()).expect("a profile");
    let sections = [CpuArchitecture::X86_64, CpuArchitecture::Aarch64, CpuArchitecture::Riscv64]
        .map(CpuArchitecture::sections)
        .concat();
    let known: BTreeMap<&str, u32> = sections.into_iter().flat_map(Section::calls).collect();
    for name in profile.syscalls.iter().flat_map(|rule| &rule.names) {
        assert!(known.contains_key(name.as_str()), "{name}");
    }
}

#[test]
fn a_restricted_profile_kills_who_calls_another_way() {
    let mut profile = SeccompProfile::parse(DEFAULT_PROFILE.as_bytes()).expect("a profile");
    profile.restrict_to(CpuArchitecture::X86_64);
    let filter = compile(&profile, &conditions(CpuArchitecture::X86_64, &[])).expect("a program");
    assert_eq!(answers(&filter, Section::I386, "socketcall", 1), KILL_PROCESS);
    assert_eq!(answers(&filter, Section::X32, "read", 0), KILL_PROCESS);
    assert_eq!(answers(&filter, Section::X86_64, "read", 0), ALLOW);
    assert_eq!(answers(&filter, Section::X86_64, "socket", 40), errno(1));
}
