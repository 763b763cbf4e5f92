//! Selects the cgroup driver: cgroupfs or systemd.

use std::{path::Path, sync::Arc};

use crate::{
    errors::{RuntimeError, RuntimeResult},
    groups::CgroupfsGroups,
    ports::Groups,
    systemd_scopes::Scopes,
};
use berth_proto::cri::CgroupDriver;
use berth_sys::cgroup::systemd;

/// The driver for the `cgroupDriver` setting on this host (spec 09 §2, §5).
///
/// # Errors
/// The host does not support the configured driver, or its name is unknown.
pub fn driver(asked: &str, is_unified: bool, has_systemd: bool) -> RuntimeResult<CgroupDriver> {
    match asked {
        "cgroupfs" => Ok(CgroupDriver::Cgroupfs),
        "systemd" if !is_unified => Err(RuntimeError::other("embedded runtime: systemd cgroup driver needs cgroup v2")),
        "systemd" if !has_systemd => Err(RuntimeError::other(systemd::NOT_RUNNING)),
        "systemd" => Ok(CgroupDriver::Systemd),
        "" | "auto" if is_unified && has_systemd => Ok(CgroupDriver::Systemd),
        "" | "auto" => Ok(CgroupDriver::Cgroupfs),
        other => Err(RuntimeError::other(format!("embeddedRuntime.cgroupDriver: unknown driver {other:?}"))),
    }
}

/// Creates the cgroup backend of a driver. Must be called within a Tokio runtime.
///
/// # Errors
/// systemd is not running.
pub fn made_by(driver: CgroupDriver, kernel: CgroupfsGroups, program: &Path) -> RuntimeResult<Arc<dyn Groups>> {
    if driver == CgroupDriver::Cgroupfs {
        return Ok(Arc::new(kernel));
    }
    let bus = systemd::Bus::of_this_machine().map_err(RuntimeError::other)?;
    Ok(Arc::new(Scopes::new(kernel, systemd::SystemdDriver::new(Arc::new(bus)), program.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_the_one_asked_for_or_the_machines() {
        let v2_only = "embedded runtime: systemd cgroup driver needs cgroup v2";
        for (asked, is_unified, has_systemd, expected) in [
            ("", true, true, Ok(CgroupDriver::Systemd)),
            ("auto", true, false, Ok(CgroupDriver::Cgroupfs)),
            ("auto", false, true, Ok(CgroupDriver::Cgroupfs)),
            ("cgroupfs", true, true, Ok(CgroupDriver::Cgroupfs)),
            ("systemd", true, true, Ok(CgroupDriver::Systemd)),
            ("systemd", false, true, Err(v2_only)),
            ("systemd", false, false, Err(v2_only)),
            ("systemd", true, false, Err("systemd not running on this host, cannot use systemd cgroups manager")),
            ("x", true, true, Err("embeddedRuntime.cgroupDriver: unknown driver \"x\"")),
        ] {
            let got = driver(asked, is_unified, has_systemd).map_err(|error| error.text);
            assert_eq!(got, expected.map_err(str::to_owned), "{asked} {is_unified} {has_systemd}");
        }
    }
}
