//! Credentials of a process: resource limits, groups, user, capabilities (spec 09a §6.4, §6.5, §7.1).

use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, Uid, capabilities, clear_ambient_capability_set,
    configure_capability_in_ambient_set, set_capabilities, set_keep_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use super::error_context::{ErrorContext, Step};
use crate::plan::{Capabilities, ProcessPlan};
use berth_sys::{child_process, privileges};

/// Upper bound of capability numbers.
const CAPABILITIES: u32 = 64;

/// Raises hard limits while this process is permitted to; soft limits follow last, because small ones would block the
/// setup in between.
///
/// Without CAP_SYS_RESOURCE a hard limit stays unchanged.
pub(super) fn raise_limits(process: &ProcessPlan) {
    for (resource, _, hard) in &process.limits {
        let _refused = child_process::set_limit(*resource, *hard, *hard);
    }
}

/// Sets soft limits, as far as the hard limits permit.
pub(super) fn set_limits(process: &ProcessPlan) {
    for (resource, soft, hard) in &process.limits {
        let hard = child_process::hard_limit(*resource).map_or(*hard, |now| now.min(*hard));
        let _refused = child_process::set_limit(*resource, (*soft).min(hard), hard);
    }
}

/// Switches to the process's user, groups, and capabilities.
///
/// `keeps_admin`: CAP_SYS_ADMIN stays effective until the program is executed, so that a seccomp filter can be loaded
/// without `no_new_privs`. It is dropped then all the same: `execve` recomputes the permitted set from the inheritable
/// and ambient sets and, for user 0, the bounding set.
pub(super) fn become_user(process: &ProcessPlan, keeps_admin: bool) -> Step<()> {
    let wanted = process.capabilities;
    privileges::drop_bounding(wanted.bounding).context(|| "drop bounding capabilities")?;
    set_keep_capabilities(true).context(|| "set PR_SET_KEEPCAPS")?;
    let groups: Vec<Gid> = process.groups.iter().copied().map(Gid::from_raw).collect();
    set_thread_groups(&groups).context(|| format!("set supplementary groups {:?}", process.groups))?;
    let (user, group) = (Uid::from_raw(process.uid), Gid::from_raw(process.gid));
    set_thread_res_gid(group, group, group).context(|| format!("set gid {}", process.gid))?;
    set_thread_res_uid(user, user, user).context(|| format!("set uid {}", process.uid))?;
    let sets = sets(wanted, capabilities(None).context(|| "read capabilities")?.permitted, keeps_admin);
    set_capabilities(None, sets).context(|| "set capabilities")?;
    set_ambient(CapabilitySet::from_bits_retain(wanted.ambient) & sets.permitted & sets.inheritable)
}

/// Limits the requested capabilities to those the shim has.
fn sets(wanted: Capabilities, had: CapabilitySet, keeps_admin: bool) -> CapabilitySets {
    let set = |bits| CapabilitySet::from_bits_retain(bits) & had;
    let more = if keeps_admin { CapabilitySet::SYS_ADMIN & had } else { CapabilitySet::empty() };
    let permitted = set(wanted.permitted) | more;
    CapabilitySets {
        effective: (set(wanted.effective) & permitted) | more,
        permitted,
        inheritable: set(wanted.inheritable),
    }
}

fn set_ambient(wanted: CapabilitySet) -> Step<()> {
    clear_ambient_capability_set().context(|| "clear ambient capabilities")?;
    for number in (0..CAPABILITIES).filter(|number| wanted.bits() >> number & 1 == 1) {
        let one = CapabilitySet::from_bits_retain(1 << number);
        configure_capability_in_ambient_set(one, true).context(|| format!("raise ambient capability {number}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_limited_to_those_of_the_shim() {
        let all = Capabilities { bounding: !0, effective: !0, permitted: !0, inheritable: !0, ambient: 0 };
        let had = CapabilitySet::CHOWN | CapabilitySet::KILL;
        assert_eq!(sets(all, had, true), CapabilitySets { effective: had, permitted: had, inheritable: had });
        let none = Capabilities::default();
        let admin = CapabilitySet::SYS_ADMIN;
        let kept = sets(none, admin | had, true);
        assert_eq!((kept.effective, kept.permitted), (admin, admin));
        assert!(kept.inheritable.is_empty());
        assert!(sets(none, admin, false).permitted.is_empty());
    }
}
