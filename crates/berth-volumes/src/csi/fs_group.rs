//! Decides whether the agent must apply `fsGroup` to a CSI volume. Pure. Implements spec 07 §10.

use k8s_openapi::api::storage::v1::CSIDriver;

use super::source::CsiVolume;

/// Inputs of the decision besides the volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access<'a> {
    /// Access modes of the persistent volume.
    pub modes: &'a [String],
    /// The pod mounts the volume read-only.
    pub read_only: bool,
    /// The driver applies the group itself.
    pub driver_applies: bool,
}

/// Error: the `CSIDriver` object has no `fsGroupPolicy`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected valid fsGroupPolicy, received nil value or empty string")]
pub struct NoPolicy;

/// Whether the agent must change the ownership and modes of the volume.
///
/// # Errors
/// If the `CSIDriver` object exists but has no policy.
pub fn must_apply(driver: Option<&CSIDriver>, volume: &CsiVolume, access: Access<'_>) -> Result<bool, NoPolicy> {
    if access.read_only || access.driver_applies {
        return Ok(false);
    }
    let policy = match driver {
        None => "ReadWriteOnceWithFSType",
        Some(driver) => driver.spec.fs_group_policy.as_deref().filter(|text| !text.is_empty()).ok_or(NoPolicy)?,
    };
    Ok(match policy {
        "None" => false,
        "File" => true,
        _ => {
            let is_one_node = |mode: &String| matches!(mode.as_str(), "ReadWriteOnce" | "ReadWriteOncePod");
            !volume.fs_type.is_empty() && (volume.is_inline || access.modes.iter().any(is_one_node))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(policy: Option<&str>) -> CSIDriver {
        let mut driver = CSIDriver::default();
        driver.spec.fs_group_policy = policy.map(str::to_owned);
        driver
    }

    #[test]
    fn the_policy_decides() {
        // AC-07-33
        let (none, file, default) =
            (driver(Some("None")), driver(Some("File")), driver(Some("ReadWriteOnceWithFSType")));
        let once = ["ReadWriteOnce".to_owned()];
        let pod = ["ReadWriteOncePod".to_owned()];
        let many = ["ReadWriteMany".to_owned(), "ReadOnlyMany".to_owned()];
        type Row<'a> = (Option<&'a CSIDriver>, &'a str, bool, &'a [String], bool);
        let table: [Row<'_>; 12] = [
            (Some(&default), "", false, &once, false),
            (Some(&default), "ext4", false, &once, true),
            (Some(&default), "ext4", false, &pod, true),
            (Some(&default), "ext4", false, &many, false),
            (Some(&default), "ext4", true, &[], true),
            (Some(&default), "", true, &[], false),
            (None, "", false, &once, false),
            (None, "ext4", false, &once, true),
            (Some(&none), "ext4", false, &once, false),
            (Some(&file), "", false, &many, true),
            (Some(&file), "", true, &[], true),
            (Some(&none), "", true, &[], false),
        ];
        for (driver, fs_type, is_inline, modes, expected) in table {
            let volume = CsiVolume { fs_type: fs_type.to_owned(), is_inline, ..CsiVolume::default() };
            let access = Access { modes, ..Access::default() };
            assert_eq!(must_apply(driver, &volume, access), Ok(expected), "{driver:?} {fs_type:?} {modes:?}");
            for access in [Access { read_only: true, ..access }, Access { driver_applies: true, ..access }] {
                assert_eq!(must_apply(driver, &volume, access), Ok(false));
            }
        }
        for policy in [None, Some("")] {
            let asked = must_apply(Some(&driver(policy)), &CsiVolume::default(), Access::default());
            assert_eq!(asked, Err(NoPolicy));
        }
    }
}
