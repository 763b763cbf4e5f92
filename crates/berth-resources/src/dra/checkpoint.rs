//! Checkpoint `dra_manager_state`: encoding, decoding, checksum. Pure. Spec 06c §3.2, 06 §4.
//!
//! Byte-compatible with the reference, so that a node can switch agents in both directions. The checksum covers the
//! text of the data as it is in the file; therefore the order of claims in foreign files does not matter.

use berth_types::PodUid;
use serde_json::{Map, Value, json};

use super::model::{ClaimKey, ClaimState, Claims, PreparedDevice};
use crate::go_json::{
    Decoded, as_object, decode_field, decode_list, decode_members, decode_optional_string, decode_string,
    decode_unsigned, parse, to_text,
};

const KIND: &str = "DRACheckpoint";
const API_VERSION: &str = "checkpoint.dra.kubelet.k8s.io/v1";

/// Reason for which a checkpoint cannot be used. The agent does not start then: it could not unprepare the claims.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DraCheckpointError {
    /// The checksum does not match the data.
    #[error("checkpoint is corrupted")]
    Corrupted,
    /// The data is of a version that this agent does not know.
    #[error("apiVersion {found:?} is not supported, expected {expected:?}", expected = API_VERSION)]
    UnsupportedVersion {
        /// Version in the file.
        found: String,
    },
    /// The content is not JSON of this format.
    #[error("cannot be decoded: {0}")]
    Json(String),
}

impl From<String> for DraCheckpointError {
    fn from(error: String) -> Self {
        Self::Json(error)
    }
}

/// Encodes claims as a file, without a trailing newline. Equal claims give equal bytes.
pub fn encode(claims: &Claims) -> Vec<u8> {
    // The order of the fields is part of the format; serde_json's feature `preserve_order` keeps it.
    let list: Vec<Value> = claims.iter().map(|(key, claim)| claim_to_json(key, claim)).collect();
    let data = to_text(&json!({ "kind": KIND, "apiVersion": API_VERSION, "ClaimInfoStateList": list }));
    let checksum = crc32fast::hash(data.as_bytes());
    to_text(&json!({ "Data": data, "Checksum": checksum })).into_bytes()
}

/// Decodes a file. No claim is prepared: after a start, drivers prepare claims again.
///
/// Unknown fields are ignored, and field names match without regard to case. Of claims with the same namespace and
/// name, the last one counts.
///
/// # Errors
/// The content is not JSON of this format, the checksum does not match, or the version is another one.
pub fn decode(content: &[u8]) -> Result<Claims, DraCheckpointError> {
    let file = parse(content)?;
    let data = decode_field(&file, "Data", decode_string)?;
    let checksum = decode_field(&file, "Checksum", decode_unsigned)?;
    if checksum != u64::from(crc32fast::hash(data.as_bytes())) {
        return Err(DraCheckpointError::Corrupted);
    }
    decode_data(data.as_bytes())
}

/// Decodes the data of a file, which the checksum covers.
///
/// # Errors
/// The data is not JSON of this format, or the version is another one.
pub fn decode_data(data: &[u8]) -> Result<Claims, DraCheckpointError> {
    let data = parse(data).map_err(|error| format!("Data: {error}"))?;
    let found = decode_field(&data, "apiVersion", decode_string)?;
    if found != API_VERSION {
        return Err(DraCheckpointError::UnsupportedVersion { found });
    }
    let claims = decode_field(&data, "ClaimInfoStateList", |list| decode_list(list, claim_from_json))?;
    Ok(claims.into_iter().collect())
}

fn claim_to_json(key: &ClaimKey, claim: &ClaimState) -> Value {
    let pods: Map<String, Value> = claim.pods.iter().map(|uid| (uid.to_string(), json!({}))).collect();
    let drivers = claim.drivers.iter().map(|(driver, devices)| {
        let devices: Vec<Value> = devices.iter().map(device_to_json).collect();
        (driver.clone(), json!({ "Devices": non_empty(&devices) }))
    });
    let drivers: Map<String, Value> = drivers.collect();
    json!({
        "ClaimUID": claim.uid,
        "ClaimName": key.name,
        "Namespace": key.namespace,
        "PodUIDs": pods,
        "DriverState": drivers,
    })
}

fn device_to_json(device: &PreparedDevice) -> Value {
    json!({
        "PoolName": device.pool,
        "DeviceName": device.device,
        "ShareID": device.share_id,
        "RequestNames": non_empty(&device.requests),
        "CDIDeviceIDs": non_empty(&device.cdi_ids),
    })
}

/// Empty lists of devices, requests, and CDI IDs are nil in the reference, and null in the file.
fn non_empty<T>(list: &[T]) -> Option<&[T]> {
    (!list.is_empty()).then_some(list)
}

fn claim_from_json(value: &Value) -> Decoded<(ClaimKey, ClaimState)> {
    let pod = |uid: &str, empty: &Value| as_object(empty).map(|_| PodUid::from(uid));
    let driver = |name: &str, state: &Value| -> Decoded<(String, Vec<PreparedDevice>)> {
        let devices = decode_field(state, "Devices", |devices| decode_list(devices, device_from_json))?;
        Ok((name.to_owned(), devices))
    };
    let key = ClaimKey {
        namespace: decode_field(value, "Namespace", decode_string)?,
        name: decode_field(value, "ClaimName", decode_string)?,
    };
    let claim = ClaimState {
        uid: decode_field(value, "ClaimUID", decode_string)?,
        pods: decode_field(value, "PodUIDs", |pods| decode_members(pods, pod))?.into_iter().collect(),
        drivers: decode_field(value, "DriverState", |states| decode_members(states, driver))?.into_iter().collect(),
        is_prepared: false,
    };
    Ok((key, claim))
}

fn device_from_json(value: &Value) -> Decoded<PreparedDevice> {
    let strings = |list: &Value| decode_list(list, decode_string);
    Ok(PreparedDevice {
        pool: decode_field(value, "PoolName", decode_string)?,
        device: decode_field(value, "DeviceName", decode_string)?,
        share_id: decode_field(value, "ShareID", decode_optional_string)?,
        requests: decode_field(value, "RequestNames", strings)?,
        cdi_ids: decode_field(value, "CDIDeviceIDs", strings)?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::{collection, prelude::*};

    use super::*;

    /// Claim of the test data that the reference publishes.
    const EXAMPLE: &str = r#"{"ClaimUID":"067798be-454e-4be4-9047-1aa06aea63f7","ClaimName":"example","Namespace":"default","PodUIDs":{"139cdb46-f989-4f17-9561-ca10cfb509a6":{}},"DriverState":{"test-driver.cdi.k8s.io":{"Devices":[{"PoolName":"worker-1","DeviceName":"dev-1","RequestNames":["test request"],"CDIDeviceIDs":["example.com/example=cdi-example"]}]}}}"#;

    /// Two claims, with and without devices.
    const TWO: &str = r#"[{"ClaimUID":"u1","ClaimName":"c1","Namespace":"a","PodUIDs":{"p1":{},"p2":{}},"DriverState":{"d1":{"Devices":null},"d2":{"Devices":[{"PoolName":"worker-1","DeviceName":"x","ShareID":"s","RequestNames":null,"CDIDeviceIDs":null},{"PoolName":"worker-1","DeviceName":"y","ShareID":null,"RequestNames":["r1","r2"],"CDIDeviceIDs":["v/c=1","v/c=2"]}]}}},{"ClaimUID":"u2","ClaimName":"c0","Namespace":"b","PodUIDs":{"p1":{}},"DriverState":{}}]"#;

    const ESCAPED: &str = r#"[{"ClaimUID":"u","ClaimName":"\u003ca\u0026b\u003e","Namespace":"\u2028\n\"\\","PodUIDs":{},"DriverState":{}}]"#;

    /// File with this text as its data.
    fn file(data: &str, checksum: u64) -> String {
        format!(r#"{{"Data":{},"Checksum":{checksum}}}"#, Value::from(data))
    }

    /// Text of data with this list of claims.
    fn data(list: &str) -> String {
        format!(r#"{{"kind":"{KIND}","apiVersion":"{API_VERSION}","ClaimInfoStateList":{list}}}"#)
    }

    /// File with the correct checksum.
    fn valid(data: &str) -> String {
        file(data, crc32fast::hash(data.as_bytes()).into())
    }

    fn key(namespace: &str, name: &str) -> ClaimKey {
        ClaimKey { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    fn claim(uid: &str, pods: &[&str], drivers: &[(&str, &[PreparedDevice])]) -> ClaimState {
        ClaimState {
            uid: uid.to_owned(),
            pods: pods.iter().map(|uid| (*uid).into()).collect(),
            drivers: drivers.iter().map(|(name, devices)| ((*name).to_owned(), devices.to_vec())).collect(),
            is_prepared: false,
        }
    }

    fn device(device: &str, requests: &[&str], cdi_ids: &[&str]) -> PreparedDevice {
        let strings = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        PreparedDevice {
            pool: "worker-1".to_owned(),
            device: device.to_owned(),
            share_id: None,
            requests: strings(requests),
            cdi_ids: strings(cdi_ids),
        }
    }

    fn example() -> Claims {
        let device = device("dev-1", &["test request"], &["example.com/example=cdi-example"]);
        let pods = ["139cdb46-f989-4f17-9561-ca10cfb509a6"];
        let uid = "067798be-454e-4be4-9047-1aa06aea63f7";
        [(key("default", "example"), claim(uid, &pods, &[("test-driver.cdi.k8s.io", &[device])]))].into()
    }

    #[test]
    fn claims_are_encoded_as_the_reference_encodes_them() {
        let shared = PreparedDevice { share_id: Some("s".to_owned()), ..device("x", &[], &[]) };
        let other = device("y", &["r1", "r2"], &["v/c=1", "v/c=2"]);
        let two: Claims = [
            (key("b", "c0"), claim("u2", &["p1"], &[])),
            (key("a", "c1"), claim("u1", &["p2", "p1"], &[("d2", &[shared, other]), ("d1", &[])])),
        ]
        .into();
        let escaped: Claims = [(key("\u{2028}\n\"\\", "<a&b>"), claim("u", &[], &[]))].into();
        for (claims, list, checksum) in [
            (Claims::new(), "[]".to_owned(), 2_361_995_144),
            (
                [(key("ns", "c1"), claim("u1", &[], &[]))].into(),
                r#"[{"ClaimUID":"u1","ClaimName":"c1","Namespace":"ns","PodUIDs":{},"DriverState":{}}]"#.to_owned(),
                279_862_767,
            ),
            (example(), format!("[{}]", EXAMPLE.replace(r#""dev-1","#, r#""dev-1","ShareID":null,"#)), 2_570_581_864),
            (two, TWO.to_owned(), 2_227_216_263),
            (escaped, ESCAPED.to_owned(), 1_976_663_695),
        ] {
            let text = file(&data(&list), checksum);
            assert_eq!(String::from_utf8(encode(&claims)).expect("UTF-8"), text);
            assert_eq!(decode(text.as_bytes()), Ok(claims), "{text}");
        }
    }

    #[test]
    fn preparation_is_not_part_of_the_checkpoint() {
        let mut prepared = example();
        prepared.values_mut().for_each(|claim| claim.is_prepared = true);
        assert_eq!(encode(&prepared), encode(&example()));
        assert_eq!(decode(&encode(&prepared)), Ok(example()));
    }

    #[test]
    fn files_of_other_writers_are_accepted() {
        let bare: Claims = [(key("ns", "c"), claim("u", &[], &[]))].into();
        let empty_device: Claims = [(key("ns", "c"), claim("u", &[], &[("d", &[PreparedDevice::default()])]))].into();
        let list = |members: &str| data(&format!(r#"[{{"ClaimUID":"u","ClaimName":"c","Namespace":"ns"{members}}}]"#));
        for (text, expected) in [
            // Checksums that the reference publishes.
            (file(&data("[]"), 2_361_995_144), Claims::new()),
            (file(&data("null"), 4_010_664_294), Claims::new()),
            (file(&data(&format!("[{EXAMPLE}]")), 1_656_016_162), example()),
            // Missing fields, null fields, and fields of later versions.
            (valid(&format!(r#"{{"apiVersion":"{API_VERSION}"}}"#)), Claims::new()),
            (valid(&list("")), bare.clone()),
            (valid(&list(r#","PodUIDs":null,"DriverState":null,"Later":[{}]"#)), bare),
            (valid(&list(r#","DriverState":{"d":{"Devices":[null],"Later":1}}"#)), empty_device.clone()),
            (
                valid(&list(
                    r#","DriverState":{"d":{"Devices":[{"PoolName":null,"RequestNames":null,"CDIDeviceIDs":[]}]}}"#,
                )),
                empty_device,
            ),
            // Of claims with the same name, the last one counts.
            (valid(&data(&format!("[{},{EXAMPLE}]", EXAMPLE.replace("067798be", "0")))), example()),
            // Other cases of field names, another kind, white space.
            (
                valid(&data(&format!("[ {} ]", EXAMPLE.replace("ClaimUID", "claimuid").replace("Devices", "DEVICES")))),
                example(),
            ),
            (valid(&data("[]").replace(KIND, "Other")), Claims::new()),
            (valid(&data("[]")).replace("\"Data", " \"data").replace("Checksum", "checkSUM"), Claims::new()),
        ] {
            assert_eq!(decode(text.as_bytes()), Ok(expected), "{text}");
        }
    }

    #[test]
    fn wrong_checksums_are_refused() {
        for text in [
            file(&data("[]"), 4_010_664_294),
            file(&data("[]"), 0),
            file(&data("[]"), 2_361_995_144 + (1 << 32)),
            file(&data("null"), 2_361_995_144),
            valid(&data("[]")).replace("[]", "[ ]"),
            r#"{"Checksum":1}"#.to_owned(),
        ] {
            let error = decode(text.as_bytes()).expect_err("a wrong checksum");
            assert_eq!(error, DraCheckpointError::Corrupted, "{text}");
            assert_eq!(error.to_string(), "checkpoint is corrupted");
        }
    }

    #[test]
    fn other_versions_are_refused() {
        for found in ["checkpoint.dra.kubelet.k8s.io/v2", "checkpoint.dra.kubelet.k8s.io/V1", "v1", ""] {
            let error = decode(valid(&data("[]").replace(API_VERSION, found)).as_bytes()).expect_err("another version");
            let text = format!(r#"apiVersion "{found}" is not supported, expected "checkpoint.dra.kubelet.k8s.io/v1""#);
            assert_eq!(error.to_string(), text);
        }
        assert_eq!(
            decode(valid("{}").as_bytes()),
            Err(DraCheckpointError::UnsupportedVersion { found: String::new() })
        );
    }

    #[test]
    fn other_formats_are_refused() {
        let list = |members: &str| valid(&data(&format!("[{{{members}}}]")));
        for (text, error) in [
            ("[7]".to_owned(), "expected an object"),
            (r#"{"Data":{}}"#.to_owned(), "Data: expected a string"),
            (r#"{"Data":"","Checksum":-1}"#.to_owned(), "Checksum: expected an unsigned integer"),
            (valid("[7]"), "expected an object"),
            (valid(r#"{"apiVersion":7}"#), "apiVersion: expected a string"),
            (valid(&data("{}")), "ClaimInfoStateList: expected an array"),
            (valid(&data("[7]")), "ClaimInfoStateList: expected an object"),
            (list(r#""ClaimName":7"#), "ClaimInfoStateList: ClaimName: expected a string"),
            (list(r#""PodUIDs":["p"]"#), "ClaimInfoStateList: PodUIDs: expected an object"),
            (list(r#""PodUIDs":{"p":1}"#), "ClaimInfoStateList: PodUIDs: expected an object"),
            (
                list(r#""DriverState":{"d":{"Devices":{}}}"#),
                "ClaimInfoStateList: DriverState: Devices: expected an array",
            ),
            (
                list(r#""DriverState":{"d":{"Devices":[{"ShareID":1}]}}"#),
                "ClaimInfoStateList: DriverState: Devices: ShareID: expected a string",
            ),
        ] {
            let found = decode(text.as_bytes()).expect_err("another format");
            assert_eq!(found, DraCheckpointError::Json(error.to_owned()), "{text}");
            assert_eq!(found.to_string(), format!("cannot be decoded: {error}"));
        }
        // Without data, the checksum of the empty text matches.
        for text in ["", "{", "{}", "null", "{}{}", "\u{feff}{}"] {
            assert!(matches!(decode(text.as_bytes()), Err(DraCheckpointError::Json(_))), "{text}");
        }
    }

    fn any_name() -> impl Strategy<Value = String> {
        "[<>&\"\\\\\u{2028}\u{0}\na-c0-2é]{0,4}"
    }

    fn any_device() -> impl Strategy<Value = PreparedDevice> {
        let names = || collection::vec(any_name(), 0..3);
        (any_name(), any_name(), prop::option::of(any_name()), names(), names()).prop_map(
            |(pool, device, share_id, requests, cdi_ids)| PreparedDevice { pool, device, share_id, requests, cdi_ids },
        )
    }

    fn any_claims() -> impl Strategy<Value = Claims> {
        let key = (any_name(), any_name()).prop_map(|(namespace, name)| ClaimKey { namespace, name });
        let pods = collection::btree_set(any_name().prop_map(PodUid::from), 0..3);
        let drivers = collection::btree_map(any_name(), collection::vec(any_device(), 0..3), 0..3);
        let claim = (any_name(), pods, drivers).prop_map(|(uid, pods, drivers)| ClaimState {
            uid,
            pods,
            drivers,
            is_prepared: false,
        });
        collection::btree_map(key, claim, 0..4)
    }

    proptest! {
        #[test]
        fn decoding_reverses_encoding(claims in any_claims()) {
            prop_assert_eq!(decode(&encode(&claims)), Ok(claims));
        }

        #[test]
        fn garbage_never_panics(
            garbage in collection::vec(any::<u8>(), 0..200),
            claims in any_claims(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut content = encode(&claims);
            let at = at.index(content.len());
            content[at] = byte;
            let _any = decode(&content);
            let _any = decode(&garbage);
            if let Ok(text) = String::from_utf8(content) {
                let _any = decode(valid(&text).as_bytes());
            }
            let _any = decode(valid(&data(&String::from_utf8_lossy(&garbage))).as_bytes());
        }
    }
}
