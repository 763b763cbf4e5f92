//! CSI request fields: volume capability, pod info, and tokens. Pure. Implements spec 07 §12.3-12.6.

use std::collections::BTreeMap;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jiff::Timestamp;
use k8s_openapi::api::storage::v1::CSIDriver;
use serde_json::{Value, json};

use super::{client::Capabilities, record::Lifecycle, source::CsiVolume};
use crate::{
    attachable::Usage,
    selinux,
    spec::{Mode, VolumeSpec},
};
use berth_ports::TokenRequest;
use berth_proto::csi::{VolumeCapability, volume_capability};
use berth_types::Pod;
use volume_capability::access_mode::Mode as AccessMode;

const POD: &str = "csi.storage.k8s.io/pod.";
const ACCOUNT: &str = "csi.storage.k8s.io/serviceAccount.name";
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";
/// Attribute or secret key of the service account tokens.
pub const TOKENS: &str = "csi.storage.k8s.io/serviceAccount.tokens";

/// Returns the CSI access mode: the first API mode counts; without one, read-write by a single node.
fn access_mode(modes: &[String], knows_single_writers: bool) -> AccessMode {
    match (modes.first().map(String::as_str), knows_single_writers) {
        (Some("ReadOnlyMany"), _) => AccessMode::MultiNodeReaderOnly,
        (Some("ReadWriteMany"), _) => AccessMode::MultiNodeMultiWriter,
        (Some("ReadWriteOncePod"), true) => AccessMode::SingleNodeSingleWriter,
        (_, true) => AccessMode::SingleNodeMultiWriter,
        (_, false) => AccessMode::SingleNodeWriter,
    }
}

/// Group and SELinux label of a volume.
#[derive(Clone, Copy, Debug, Default)]
pub struct VolumeOwnership<'a> {
    /// Group for drivers that apply it themselves.
    pub group: Option<u32>,
    /// SELinux label of the mount.
    pub label: Option<&'a str>,
}

impl<'a> VolumeOwnership<'a> {
    /// Returns the ownership that a pod requests.
    pub fn of(usage: &'a Usage) -> Self {
        Self { group: usage.group.map(|group| group.group), label: usage.label.as_deref() }
    }
}

/// Returns the volume capability of a request.
pub fn capability(
    spec: &VolumeSpec,
    volume: &CsiVolume,
    mode: Mode,
    can: Capabilities,
    whose: VolumeOwnership<'_>,
) -> VolumeCapability {
    let flags = spec.mount_options().into_iter().chain(whose.label.map(selinux::option));
    let access_type = match mode {
        Mode::Block => volume_capability::AccessType::Block(volume_capability::BlockVolume {}),
        Mode::Filesystem => volume_capability::AccessType::Mount(volume_capability::MountVolume {
            fs_type: volume.fs_type.clone(),
            mount_flags: flags.collect(),
            volume_mount_group: whose
                .group
                .filter(|_| can.sets_group)
                .map(|group| group.to_string())
                .unwrap_or_default(),
        }),
    };
    let mode = access_mode(spec.access_modes(), can.knows_single_writers);
    VolumeCapability {
        access_mode: Some(volume_capability::AccessMode { mode: mode.into() }),
        access_type: Some(access_type),
    }
}

/// Checks that the driver supports volumes of that lifecycle mode.
///
/// # Errors
/// If it does not, with the message of the upstream kubelet.
pub fn check_lifecycle_mode(driver: Option<&CSIDriver>, name: &str, life: Lifecycle) -> Result<(), String> {
    let wanted = life.as_str();
    match driver {
        None if life == Lifecycle::Persistent => Ok(()),
        None => Err(format!("volume mode {wanted:?} not supported by driver {name} (no CSIDriver object)")),
        Some(driver) => {
            let modes = driver.spec.volume_lifecycle_modes.as_deref().unwrap_or_default();
            if modes.iter().any(|mode| mode == wanted) {
                return Ok(());
            }
            let modes = modes.iter().map(|mode| format!("{mode:?}")).collect::<Vec<_>>().join(" ");
            Err(format!("volume mode {wanted:?} not supported by driver {name} (only supports [{modes}])"))
        }
    }
}

/// Whether the driver's volumes must be attached (`attachRequired`, default true).
pub fn is_attached(driver: Option<&CSIDriver>) -> bool {
    driver.and_then(|driver| driver.spec.attach_required).unwrap_or(true)
}

/// Whether the driver supports SELinux mount labels (`seLinuxMount`).
pub fn takes_labels(driver: Option<&CSIDriver>) -> bool {
    driver.and_then(|driver| driver.spec.se_linux_mount).unwrap_or(false)
}

/// Whether volumes are published again with every sync of their pod (`requiresRepublish`).
pub fn is_republished(driver: Option<&CSIDriver>) -> bool {
    driver.and_then(|driver| driver.spec.requires_republish).unwrap_or(false)
}

/// Whether tokens are passed in the secrets (`serviceAccountTokenInSecrets`).
pub fn keeps_tokens_secret(driver: Option<&CSIDriver>) -> bool {
    driver.and_then(|driver| driver.spec.service_account_token_in_secrets).unwrap_or(false)
}

/// Returns the pod's attributes if the driver requests them (`podInfoOnMount`).
pub fn pod_info(driver: Option<&CSIDriver>, pod: &Pod, life: Lifecycle) -> BTreeMap<String, String> {
    if !driver.and_then(|driver| driver.spec.pod_info_on_mount).unwrap_or(false) {
        return BTreeMap::new();
    }
    let account = pod.spec().service_account_name.clone().unwrap_or_default();
    let is_ephemeral = (life == Lifecycle::Ephemeral).to_string();
    BTreeMap::from([
        (format!("{POD}name"), pod.name().to_owned()),
        (format!("{POD}namespace"), pod.namespace().to_owned()),
        (format!("{POD}uid"), pod.uid().to_string()),
        (ACCOUNT.to_owned(), account),
        (EPHEMERAL.to_owned(), is_ephemeral),
    ])
}

/// Returns the tokens that the driver requests for its pods.
pub fn token_requests(driver: Option<&CSIDriver>) -> Vec<TokenRequest> {
    let requests = driver.and_then(|driver| driver.spec.token_requests.as_deref()).unwrap_or_default();
    let ask = |audience: &str, expiration_seconds| TokenRequest { audience: audience.to_owned(), expiration_seconds };
    requests.iter().map(|request| ask(&request.audience, request.expiration_seconds)).collect()
}

/// Returns the tokens as JSON in the drivers' format. The expiration comes from the token itself; for a token without
/// one it is now, so that no driver relies on it.
pub fn tokens(tokens: &[(TokenRequest, String)], now: Timestamp) -> String {
    let all: BTreeMap<&str, Value> = tokens
        .iter()
        .map(|(ask, token)| {
            let expires = expiry(token).unwrap_or(now);
            let expires = expires.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            (ask.audience.as_str(), json!({"expirationTimestamp": expires, "token": token}))
        })
        .collect();
    json!(all).to_string()
}

fn expiry(token: &str) -> Option<Timestamp> {
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?).ok()?;
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    Timestamp::from_second(claims.get("exp")?.as_i64()?).ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn driver(spec: Value) -> CSIDriver {
        serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": spec})).expect("a driver")
    }

    #[test]
    fn access_modes_depend_on_the_driver() {
        use AccessMode as A;
        for (mode, plain, knowing) in [
            ("ReadWriteOnce", A::SingleNodeWriter, A::SingleNodeMultiWriter),
            ("ReadWriteOncePod", A::SingleNodeWriter, A::SingleNodeSingleWriter),
            ("ReadOnlyMany", A::MultiNodeReaderOnly, A::MultiNodeReaderOnly),
            ("ReadWriteMany", A::MultiNodeMultiWriter, A::MultiNodeMultiWriter),
        ] {
            let modes = [mode.to_owned(), "ReadOnlyMany".to_owned()];
            assert_eq!((access_mode(&modes, false), access_mode(&modes, true)), (plain, knowing), "{mode}");
        }
        assert_eq!(access_mode(&[], false), A::SingleNodeWriter);
    }

    #[test]
    fn the_group_goes_to_drivers_that_take_it() {
        let volume = serde_json::from_value(json!({"metadata": {"name": "pv"},
            "spec": {"mountOptions": ["noatime"], "accessModes": ["ReadWriteOnce"]}}));
        let spec = VolumeSpec::persistent(Arc::new(volume.expect("a volume")), Arc::default(), false);
        let volume = CsiVolume { fs_type: "xfs".to_owned(), ..CsiVolume::default() };
        let label = Some("u:r:t:s0:c1,c2");
        let of = |can: Capabilities, mode| {
            capability(&spec, &volume, mode, can, VolumeOwnership { group: Some(7), label }).access_type
        };
        let mount = |group: &str| {
            Some(volume_capability::AccessType::Mount(volume_capability::MountVolume {
                fs_type: "xfs".to_owned(),
                mount_flags: vec!["noatime".to_owned(), "context=\"u:r:t:s0:c1,c2\"".to_owned()],
                volume_mount_group: group.to_owned(),
            }))
        };
        let can = Capabilities { sets_group: true, ..Capabilities::default() };
        assert_eq!(of(can, Mode::Filesystem), mount("7"));
        assert_eq!(of(Capabilities::default(), Mode::Filesystem), mount(""));
        let block = Some(volume_capability::AccessType::Block(volume_capability::BlockVolume {}));
        assert_eq!(of(can, Mode::Block), block);
    }

    #[test]
    fn the_driver_must_support_the_lifecycle_mode() {
        let both = driver(json!({"volumeLifecycleModes": ["Persistent", "Ephemeral"]}));
        let one = driver(json!({"volumeLifecycleModes": ["Persistent"]}));
        assert_eq!(check_lifecycle_mode(None, "d", Lifecycle::Persistent), Ok(()));
        assert_eq!(check_lifecycle_mode(Some(&both), "d", Lifecycle::Ephemeral), Ok(()));
        let text = "volume mode \"Ephemeral\" not supported by driver d (no CSIDriver object)";
        assert_eq!(check_lifecycle_mode(None, "d", Lifecycle::Ephemeral), Err(text.to_owned()));
        let text = "volume mode \"Ephemeral\" not supported by driver d (only supports [\"Persistent\"])";
        assert_eq!(check_lifecycle_mode(Some(&one), "d", Lifecycle::Ephemeral), Err(text.to_owned()));
    }

    #[test]
    fn pod_info_is_passed_only_to_drivers_that_request_it() {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"serviceAccountName": "robot", "containers": []}});
        let pod = Pod::new(serde_json::from_value(pod).expect("a pod")).expect("complete");
        let asking = driver(json!({"podInfoOnMount": true}));
        assert!(pod_info(None, &pod, Lifecycle::Persistent).is_empty());
        assert!(pod_info(Some(&driver(json!({}))), &pod, Lifecycle::Persistent).is_empty());
        let attributes = pod_info(Some(&asking), &pod, Lifecycle::Ephemeral);
        let expected = json!({
            "csi.storage.k8s.io/pod.name": "p", "csi.storage.k8s.io/pod.namespace": "n",
            "csi.storage.k8s.io/pod.uid": "u", "csi.storage.k8s.io/serviceAccount.name": "robot",
            "csi.storage.k8s.io/ephemeral": "true"});
        assert_eq!(json!(attributes), expected);
        assert_eq!(pod_info(Some(&asking), &pod, Lifecycle::Persistent)[EPHEMERAL], "false");
    }

    #[test]
    fn tokens_are_passed_with_their_expiration() {
        let wanting = driver(json!({"tokenRequests": [{"audience": ""}, {"audience": "a", "expirationSeconds": 600}]}));
        let asked = token_requests(Some(&wanting));
        assert_eq!(
            asked.iter().map(|ask| (ask.audience.as_str(), ask.expiration_seconds)).collect::<Vec<_>>(),
            [("", None), ("a", Some(600))]
        );
        assert!(token_requests(None).is_empty());
        let token = format!("x.{}.y", URL_SAFE_NO_PAD.encode(r#"{"exp":1767225600}"#));
        let had = [(asked[0].clone(), token.clone()), (asked[1].clone(), "opaque".to_owned())];
        let now = "2026-01-02T00:00:00.5Z".parse().expect("a time");
        let parsed: Value = serde_json::from_str(&tokens(&had, now)).expect("JSON");
        assert_eq!(
            parsed,
            json!({"": {"token": token, "expirationTimestamp": "2026-01-01T00:00:00Z"},
            "a": {"token": "opaque", "expirationTimestamp": "2026-01-02T00:00:00Z"}})
        );
    }
}
