//! Linux capability sets of a container's processes. Pure.
//! Implements spec 09a §7.1, §7.2.

use super::refusal::LaunchError;
use berth_proto::cri;
use berth_shim::plan::Capabilities;

/// Capability names without `CAP_`, indexed by the kernel's number.
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// Default capabilities of a container that requests no change.
const DEFAULT: [&str; 14] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FSETID",
    "FOWNER",
    "MKNOD",
    "NET_RAW",
    "SETGID",
    "SETUID",
    "SETFCAP",
    "SETPCAP",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "KILL",
    "AUDIT_WRITE",
];

/// The bit mask of a capability, by its case-insensitive name with or without `CAP_`; `None` if unknown.
pub fn bit(name: &str) -> Option<u64> {
    let upper = name.to_ascii_uppercase();
    let bare = upper.strip_prefix("CAP_").unwrap_or(&upper);
    let number = NAMES.iter().position(|known| *known == bare)?;
    1_u64.checked_shl(u32::try_from(number).ok()?)
}

/// The names of the capabilities in a set, without `CAP_`.
pub fn names(set: u64) -> Vec<&'static str> {
    NAMES.iter().enumerate().filter(|(number, _)| (set >> number) & 1 == 1).map(|(_, name)| *name).collect()
}

/// The capability sets of a container's first process. `host` is the set that the kernel supports and the agent has in
/// its bounding set: it caps every result.
///
/// # Errors
/// A name is unknown.
pub fn capabilities(
    requested: Option<&cri::Capability>,
    is_privileged: bool,
    host: u64,
) -> Result<Capabilities, LaunchError> {
    if is_privileged {
        return Ok(sets(host, 0));
    }
    let nothing = cri::Capability::default();
    let requested = requested.unwrap_or(&nothing);
    let mut set = DEFAULT.iter().filter_map(|name| bit(name)).fold(0, |set, bit| set | bit);
    if requested.add_capabilities.iter().any(|name| is_all(name)) {
        set = host;
    }
    if requested.drop_capabilities.iter().any(|name| is_all(name)) {
        set = 0;
    }
    let ambient = bits(&requested.add_ambient_capabilities, host)?;
    set |= bits(&requested.add_capabilities, 0)? | ambient;
    let dropped = bits(&requested.drop_capabilities, 0)?;
    Ok(sets(set & !dropped & host, ambient & !dropped & host))
}

fn sets(set: u64, ambient: u64) -> Capabilities {
    Capabilities { bounding: set, effective: set, permitted: set, inheritable: ambient, ambient }
}

fn is_all(name: &str) -> bool {
    name.eq_ignore_ascii_case("ALL") || name.eq_ignore_ascii_case("CAP_ALL")
}

fn bits(names: &[String], all: u64) -> Result<u64, LaunchError> {
    names.iter().try_fold(0, |set, name| match bit(name) {
        Some(bit) => Ok(set | bit),
        None if is_all(name) => Ok(set | all),
        None => Err(LaunchError::invalid(format!("unknown capability {name:?}"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: u64 = (1 << 41) - 1;
    /// The default set as `/proc/self/status` of a container shows it under any runtime.
    const USUAL: u64 = 0x0000_0000_a804_25fb;

    fn check(name: &str, add: &[&str], drop: &[&str], ambient: &[&str], expected: Result<(u64, u64), &str>) {
        let list = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
        let requested = cri::Capability {
            add_capabilities: list(add),
            drop_capabilities: list(drop),
            add_ambient_capabilities: list(ambient),
        };
        let got = capabilities(Some(&requested), false, HOST);
        match (got, expected) {
            (Ok(got), Ok((set, ambient))) => assert_eq!(got, sets(set, ambient), "{name}"),
            (Err(refusal), Err(text)) => assert_eq!(refusal, LaunchError::invalid(text), "{name}"),
            (got, _) => panic!("{name}: {got:?}"),
        }
    }

    #[test]
    fn adds_and_drops_have_an_order() {
        let admin = 1 << 21;
        check("nothing", &[], &[], &[], Ok((USUAL, 0)));
        check("one more", &["cap_sys_admin"], &[], &[], Ok((USUAL | admin, 0)));
        check("one less", &[], &["NET_RAW"], &[], Ok((USUAL & !(1 << 13), 0)));
        check("all", &["ALL"], &[], &[], Ok((HOST, 0)));
        check("none", &[], &["all"], &[], Ok((0, 0)));
        check("only one", &["SYS_ADMIN"], &["ALL"], &[], Ok((admin, 0)));
        check("all but one", &["ALL"], &["SYS_ADMIN"], &[], Ok((HOST & !admin, 0)));
        check("all and none", &["ALL"], &["ALL"], &[], Ok((0, 0)));
        check("both", &["SYS_ADMIN"], &["SYS_ADMIN"], &[], Ok((USUAL, 0)));
        check("ambient", &[], &["ALL"], &["NET_BIND_SERVICE"], Ok((1 << 10, 1 << 10)));
        check("odd", &["FLY"], &[], &[], Err("unknown capability \"FLY\""));
        check("odd too", &[], &["CAP_"], &[], Err("unknown capability \"CAP_\""));
    }

    #[test]
    fn nothing_is_given_that_we_do_not_have() {
        let few = USUAL & !(1 << 27);
        assert_eq!(capabilities(None, false, few), Ok(sets(few, 0)));
        assert_eq!(capabilities(None, true, few), Ok(sets(few, 0)));
    }
}
