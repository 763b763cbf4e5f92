//! Help text of the flags, and flag values for `/flagz`, the log, and that help. Pure. Spec 01 §2.1, §7.4.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{FLAGS, Flag, FlagTarget, KubeletSettings, ValueSyntax, VersionRequest};

const DESCRIPTION: &str = "\
The kubelet is the primary node agent: it runs the pods that the API server, files, and URLs provide,
and reports their status. This is Berth, a drop-in replacement for kubelet v1.36.

Usage:
  kubelet [flags]

Flags:
";

/// Returns the help text: a description, and every flag with its default.
pub fn help(defaults: &KubeletSettings) -> String {
    let mut flags: Vec<&Flag> = FLAGS.iter().collect();
    flags.sort_by_key(|flag| flag.name);
    let values = values(defaults);
    let mut out = DESCRIPTION.to_owned();
    for flag in flags {
        let letter = flag.shorthand.map_or("    ".to_owned(), |letter| format!("-{letter}, "));
        let default = values.get(flag.name).map_or("", String::as_str);
        let default = if is_plain(default) { String::new() } else { format!(" (default {default})") };
        let old = flag.deprecated.map_or(String::new(), |message| format!(" (DEPRECATED: {message})"));
        let kind = kind(&flag.slot);
        let _ = writeln!(out, "  {letter}--{}{kind}\n          {}{default}{old}", flag.name, flag.help);
    }
    out
}

fn is_plain(default: &str) -> bool {
    matches!(default, "" | "false" | "0" | "[]" | "0s")
}

fn kind(slot: &FlagTarget) -> &'static str {
    match slot {
        FlagTarget::Bool(_) | FlagTarget::Version(_) | FlagTarget::Ignored(ValueSyntax::Bool, _) => "",
        FlagTarget::Int32(_)
        | FlagTarget::Int64(_)
        | FlagTarget::Level(_)
        | FlagTarget::Ignored(ValueSyntax::Int, _) => " int",
        FlagTarget::Text(_) | FlagTarget::Ignored(ValueSyntax::Text, _) => " string",
        FlagTarget::Duration(_) | FlagTarget::Ignored(ValueSyntax::Duration, _) => " duration",
        FlagTarget::Quantity(_) => " quantity",
        FlagTarget::Texts(_) => " strings",
        FlagTarget::Pairs(super::Pairs::Below, _) => " signal<quantity,...",
        FlagTarget::Pairs(..) | FlagTarget::Labels(_) => " key=value,...",
        FlagTarget::Gates(_) => " name=true|false,...",
        FlagTarget::Headers(_) => " name:value,...",
        FlagTarget::Ip(_) => " ip",
        FlagTarget::ReservedMemory(_) => " node:type=quantity,...;...",
        FlagTarget::Taints(_) => " key=value:effect,...",
        FlagTarget::VModule(_) => " pattern=N,...",
    }
}

/// Returns every flag with its value, sorted by name.
pub fn values(settings: &KubeletSettings) -> BTreeMap<&'static str, String> {
    let mut settings = settings.clone();
    FLAGS.iter().map(|flag| (flag.name, value(flag, &mut settings))).collect()
}

fn value(flag: &Flag, s: &mut KubeletSettings) -> String {
    let pairs = |map: &BTreeMap<String, String>, between: char| {
        map.iter().map(|(key, value)| format!("{key}{between}{value}")).collect::<Vec<_>>().join(",")
    };
    match flag.slot {
        FlagTarget::Bool(lens) => lens(s).to_string(),
        FlagTarget::Int32(lens) => lens(s).to_string(),
        FlagTarget::Int64(lens) => lens(s).to_string(),
        FlagTarget::Level(lens) => lens(s).to_string(),
        FlagTarget::Text(lens) | FlagTarget::Ip(lens) => lens(s).clone(),
        FlagTarget::Duration(lens) => lens(s).to_string(),
        FlagTarget::Quantity(lens) => lens(s).to_string(),
        FlagTarget::Texts(lens) => format!("[{}]", lens(s).join(",")),
        FlagTarget::Pairs(super::Pairs::Below, lens) => pairs(lens(s), '<'),
        FlagTarget::Pairs(_, lens) | FlagTarget::Labels(lens) => pairs(lens(s), '='),
        FlagTarget::Gates(lens) => lens(s).iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(","),
        FlagTarget::Headers(lens) => {
            let one = |(name, values): (&String, &Vec<String>)| {
                values.iter().map(|value| format!("{name}:{value}")).collect::<Vec<_>>().join(",")
            };
            lens(s).iter().map(one).collect::<Vec<_>>().join(",")
        }
        FlagTarget::ReservedMemory(lens) => {
            let limits = |r: &crate::fields::MemoryReservation| {
                r.limits.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(",")
            };
            lens(s).iter().map(|r| format!("{}:{}", r.numa_node, limits(r))).collect::<Vec<_>>().join(";")
        }
        FlagTarget::Taints(lens) => {
            lens(s).iter().map(|t| format!("{}={}:{}", t.key, t.value, t.effect)).collect::<Vec<_>>().join(",")
        }
        FlagTarget::VModule(lens) => {
            lens(s).iter().map(|i| format!("{}={}", i.file_pattern, i.verbosity)).collect::<Vec<_>>().join(",")
        }
        FlagTarget::Version(lens) => match lens(s) {
            VersionRequest::None => "false".to_owned(),
            VersionRequest::Line => "true".to_owned(),
            VersionRequest::Raw => "raw".to_owned(),
            VersionRequest::Override(version) => version.clone(),
        },
        FlagTarget::Ignored(_, default) => {
            s.flags.ignored.get(flag.name).cloned().unwrap_or_else(|| default.to_owned())
        }
    }
}
