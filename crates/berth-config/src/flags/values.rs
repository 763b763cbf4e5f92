//! Parsers of flag values. Pure. Spec 01 §2.2.

use std::{collections::BTreeMap, net::IpAddr};

use super::{Flag, FlagTarget, KubeletSettings, Pairs, ValueSyntax, VersionRequest};
use crate::{
    fields::{ConfigQuantity, MemoryReservation, Taint, VModuleItem},
    names,
    text::quote,
    version,
};
use berth_types::go_bool;

/// Sets `flag` to `value`; its `first` use on a command line clears lists and maps.
///
/// # Errors
/// The value is malformed; contains the reference's text.
pub(super) fn set(flag: &'static Flag, value: &str, first: bool, s: &mut KubeletSettings) -> Result<(), String> {
    match flag.slot {
        FlagTarget::Bool(lens) => *lens(s) = boolean(value)?,
        FlagTarget::Int32(lens) => *lens(s) = integer::<i32>(value)?,
        FlagTarget::Int64(lens) => *lens(s) = integer::<i64>(value)?,
        FlagTarget::Level(lens) => *lens(s) = level::<u32>(value)?,
        FlagTarget::Text(lens) => value.clone_into(lens(s)),
        FlagTarget::Duration(lens) => *lens(s) = value.parse().map_err(text)?,
        FlagTarget::Quantity(lens) => *lens(s) = ConfigQuantity::parse(value).map_err(text)?,
        FlagTarget::Texts(lens) => extend(lens(s), csv(value)?, first),
        FlagTarget::Pairs(pairs, lens) => fill(lens(s), map(pairs, value)?, first),
        FlagTarget::Gates(lens) => fill(lens(s), gates(value)?, first),
        FlagTarget::Headers(lens) => headers(lens(s), value, first)?,
        FlagTarget::Labels(lens) => lens(s).extend(labels(value)),
        FlagTarget::Ip(lens) => {
            if let Some(ip) = address(value)? {
                *lens(s) = ip;
            }
        }
        // An empty value has no effect, so it does not clear the list either.
        FlagTarget::ReservedMemory(lens) if !value.is_empty() => extend(lens(s), reserved_memory(value)?, first),
        FlagTarget::ReservedMemory(_) => {}
        FlagTarget::Taints(lens) => *lens(s) = taints(value)?,
        FlagTarget::VModule(lens) => lens(s).extend(vmodule(value)?),
        FlagTarget::Version(lens) => *lens(s) = version_request(value)?,
        FlagTarget::Ignored(syntax, _) => {
            ignored(syntax, value)?;
            s.flags.ignored.insert(flag.name, value.to_owned());
        }
    }
    Ok(())
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn extend<T>(list: &mut Vec<T>, items: Vec<T>, first: bool) {
    if first {
        list.clear();
    }
    list.extend(items);
}

fn fill<T>(map: &mut BTreeMap<String, T>, items: Vec<(String, T)>, first: bool) {
    if first {
        map.clear();
    }
    map.extend(items);
}

/// Parses a boolean like Go's `strconv.ParseBool`.
pub(super) fn boolean(value: &str) -> Result<bool, String> {
    go_bool::parse(value).ok_or_else(|| format!("strconv.ParseBool: parsing {}: invalid syntax", quote(value)))
}

/// Parses an integer in Go's notation: decimal, or `0x`, `0o`, `0b`, with `_` between digits.
fn integer<T: TryFrom<i128>>(value: &str) -> Result<T, String> {
    let fail = |why: &str| format!("strconv.ParseInt: parsing {}: {why}", quote(value));
    let (negative, digits) = match value.strip_prefix(['-', '+']) {
        Some(digits) => (value.starts_with('-'), digits),
        None => (false, value),
    };
    let lower = digits.to_ascii_lowercase();
    let (radix, digits) = match lower.get(..2) {
        Some("0x") => (16, lower.get(2..).unwrap_or_default()),
        Some("0b") => (2, lower.get(2..).unwrap_or_default()),
        Some("0o") => (8, lower.get(2..).unwrap_or_default()),
        _ if lower.len() > 1 && lower.starts_with('0') => (8, lower.get(1..).unwrap_or_default()),
        _ => (10, lower.as_str()),
    };
    let separated = radix != 10 || !digits.contains('_');
    let digits = digits.replace('_', "");
    if digits.is_empty() || !separated || !digits.chars().all(|c| c.is_digit(radix)) {
        return Err(fail("invalid syntax"));
    }
    let size = i128::from_str_radix(&digits, radix).map_err(|_| fail("value out of range"))?;
    T::try_from(if negative { -size } else { size }).map_err(|_| fail("value out of range"))
}

/// Parses a log verbosity level.
fn level<T: TryFrom<u64>>(value: &str) -> Result<T, String> {
    let fail = |why: &str| format!("strconv.ParseUint: parsing {}: {why}", quote(value));
    if value.is_empty() || !value.bytes().all(|b| b.is_ascii_digit()) {
        return Err(fail("invalid syntax"));
    }
    value.parse::<u64>().ok().and_then(|n| T::try_from(n).ok()).ok_or_else(|| fail("value out of range"))
}

/// Parses one record of comma-separated values; a quoted value may contain commas.
fn csv(value: &str) -> Result<Vec<String>, String> {
    if value.is_empty() {
        return Ok(Vec::new());
    }
    let mut fields = vec![String::new()];
    let mut quoted = false;
    let mut chars = value.chars().peekable();
    while let Some(c) = chars.next() {
        let fresh = fields.last().is_some_and(String::is_empty);
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => {
                chars.next();
                push(&mut fields, '"');
            }
            '"' if quoted => quoted = false,
            '"' if fresh => quoted = true,
            '"' => return Err("parse error on line 1: bare \" in non-quoted-field".to_owned()),
            ',' if !quoted => fields.push(String::new()),
            c => push(&mut fields, c),
        }
    }
    if quoted { Err("parse error on line 1: extraneous or missing \" in quoted-field".to_owned()) } else { Ok(fields) }
}

fn push(fields: &mut [String], c: char) {
    if let Some(last) = fields.last_mut() {
        last.push(c);
    }
}

fn map(pairs: Pairs, value: &str) -> Result<Vec<(String, String)>, String> {
    let (separator, expected) = match pairs {
        Pairs::Equal | Pairs::Single => ('=', "malformed pair, expect string=string"),
        Pairs::Below => ('<', "malformed pair, expect string<string"),
    };
    let items: Vec<&str> = if pairs == Pairs::Single { vec![value] } else { value.split(',').collect() };
    let pair = |item: &str| {
        let (key, value) = item.split_once(separator).ok_or_else(|| expected.to_owned())?;
        Ok((key.trim().to_owned(), value.trim().to_owned()))
    };
    items.into_iter().filter(|item| !item.is_empty()).map(pair).collect()
}

fn gates(value: &str) -> Result<Vec<(String, bool)>, String> {
    let pair = |item: &str| {
        let (name, value) = item.split_once('=').ok_or_else(|| "malformed pair, expect string=bool".to_owned())?;
        let (name, value) = (name.trim(), value.trim());
        let value = boolean(value).map_err(|e| format!("invalid value of {name}: {value}, err: {e}"))?;
        Ok((name.to_owned(), value))
    };
    value.split(',').filter(|item| !item.is_empty()).map(pair).collect()
}

fn headers(map: &mut BTreeMap<String, Vec<String>>, value: &str, first: bool) -> Result<(), String> {
    if first {
        map.clear();
    }
    for item in value.split(',').filter(|item| !item.is_empty()) {
        let (name, value) = item.split_once(':').ok_or("malformed pair, expect string:string")?;
        map.entry(name.trim().to_owned()).or_default().push(value.trim().to_owned());
    }
    Ok(())
}

fn labels(value: &str) -> Vec<(String, String)> {
    let items = value.split(',').map(str::trim).filter(|item| !item.is_empty());
    items
        .map(|item| {
            let (key, value) = item.split_once('=').unwrap_or((item, ""));
            (key.trim().to_owned(), value.trim().to_owned())
        })
        .collect()
}

/// Returns an address as given, `None` for an empty value; leading zeros in IPv4 numbers are accepted.
fn address(value: &str) -> Result<Option<String>, String> {
    if value.is_empty() {
        return Ok(None);
    }
    match sloppy_ip(value) {
        Some(_) => Ok(Some(value.to_owned())),
        None => Err(format!("{} is not a valid IP address", quote(value))),
    }
}

/// Parses an IP address; leading zeros in IPv4 numbers are accepted (`k8s.io/utils/net`, `ParseIPSloppy`).
pub fn sloppy_ip(value: &str) -> Option<IpAddr> {
    if value.contains(':') {
        return value.parse().ok();
    }
    let plain: Vec<&str> = value
        .split('.')
        .map(|part| match part.trim_start_matches('0') {
            "" if !part.is_empty() => "0",
            rest => rest,
        })
        .collect();
    plain.join(".").parse().ok()
}

fn reserved_memory(value: &str) -> Result<Vec<MemoryReservation>, String> {
    value.split(';').map(reservation).collect()
}

fn reservation(item: &str) -> Result<MemoryReservation, String> {
    let format = || {
        format!(
            "the reserved memory has incorrect format, expected numaNodeID:type=quantity[,type=quantity...], got {item}"
        )
    };
    let (node, list) = item.split_once(':').filter(|(_, list)| !list.contains(':')).ok_or_else(format)?;
    let numa_node =
        node.parse().map_err(|_| format!("failed to convert the NUMA node ID, expected integer, got {node}"))?;
    let mut limits = BTreeMap::new();
    for limit in list.split(',') {
        let incorrect = || format!("the reserved limit has incorrect value, expected type=quantity, got {limit}");
        let (name, quantity) =
            limit.split_once('=').filter(|(_, quantity)| !quantity.contains('=')).ok_or_else(incorrect)?;
        if name != "memory" && !name.starts_with("hugepages-") {
            return Err(format!("memory type conversion error, unknown type: {}", quote(name)));
        }
        let quantity =
            ConfigQuantity::parse(quantity).map_err(|_| format!("failed to parse the quantity: {quantity}"))?;
        limits.insert(name.to_owned(), quantity);
    }
    Ok(MemoryReservation { numa_node, limits })
}

fn taints(value: &str) -> Result<Vec<Taint>, String> {
    let mut taints: Vec<Taint> = Vec::new();
    for item in value.split(',').filter(|_| !value.is_empty()) {
        if let Some(removed) = item.strip_suffix('-') {
            taint(removed)?;
            continue;
        }
        let taint = taint(item)?;
        if taint.effect.is_empty() {
            return Err(format!("invalid taint spec: {item}"));
        }
        if taints.iter().any(|known| known.key == taint.key && known.effect == taint.effect) {
            return Err(format!("duplicated taints with the same key and effect: {}", shown(&taint)));
        }
        taints.push(taint);
    }
    Ok(taints)
}

/// Formats a taint as Go prints the struct.
pub(crate) fn shown(taint: &Taint) -> String {
    let added = taint.time_added.as_deref().unwrap_or("<nil>");
    format!("{{{} {} {} {added}}}", taint.key, taint.value, taint.effect)
}

/// Whether the effect is a valid taint effect.
pub(crate) fn is_taint_effect(effect: &str) -> bool {
    matches!(effect, "NoSchedule" | "PreferNoSchedule" | "NoExecute")
}

fn taint(item: &str) -> Result<Taint, String> {
    let invalid = |reasons: Vec<String>| match reasons.is_empty() {
        true => format!("invalid taint spec: {item}"),
        false => format!("invalid taint spec: {item}, {}", reasons.join("; ")),
    };
    let (pair, effect) = match item.split_once(':') {
        Some((_, effect)) if effect.contains(':') => return Err(invalid(Vec::new())),
        Some((pair, effect)) => (pair, effect),
        None => (item, ""),
    };
    if item.contains(':') && !is_taint_effect(effect) {
        return Err(format!("invalid taint effect: {effect}, unsupported taint effect"));
    }
    let (key, value) = match pair.split_once('=') {
        Some(_) if effect.is_empty() => (pair, ""),
        Some((_, value)) if value.contains('=') => return Err(invalid(Vec::new())),
        Some((key, value)) => (key, value),
        None => (pair, ""),
    };
    let reasons = names::label_value(value);
    let reasons = if reasons.is_empty() { names::qualified_name(key) } else { reasons };
    if !reasons.is_empty() {
        return Err(invalid(reasons));
    }
    Ok(Taint { key: key.to_owned(), value: value.to_owned(), effect: effect.to_owned(), time_added: None })
}

fn vmodule(value: &str) -> Result<Vec<VModuleItem>, String> {
    let item = |item: &str| {
        let malformed = || format!("{} does not have the pattern=N format", quote(item));
        let (pattern, number) = item
            .split_once('=')
            .filter(|(p, n)| !p.is_empty() && !n.is_empty() && !n.contains('='))
            .ok_or_else(malformed)?;
        let verbosity = level::<u32>(number).map_err(|e| format!("parsing verbosity in {}: {e}", quote(item)))?;
        Ok(VModuleItem { file_pattern: pattern.to_owned(), verbosity })
    };
    value.split(',').filter(|item| !item.is_empty()).map(item).collect()
}

fn version_request(value: &str) -> Result<VersionRequest, String> {
    match value {
        "" | "raw" => Ok(VersionRequest::Raw),
        v if v.starts_with('v') => {
            let core = v.split(['-', '+']).next().unwrap_or(v);
            if core != version::VERSION {
                return Err(format!(
                    "version {} must match major/minor/patch of default version {}",
                    quote(v),
                    quote(version::VERSION)
                ));
            }
            Ok(VersionRequest::Override(v.to_owned()))
        }
        v => Ok(if boolean(v)? { VersionRequest::Line } else { VersionRequest::None }),
    }
}

fn ignored(syntax: ValueSyntax, value: &str) -> Result<(), String> {
    match syntax {
        ValueSyntax::Bool => boolean(value).map(drop),
        ValueSyntax::Int => integer::<i64>(value).map(drop),
        ValueSyntax::Duration => value.parse::<crate::GoDuration>().map(drop).map_err(text),
        ValueSyntax::Text => Ok(()),
    }
}
