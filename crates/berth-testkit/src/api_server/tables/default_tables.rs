//! Tables of kinds with few columns, and the default table. Pure.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    super::rules::fields::{fields, list, number, text, texts},
    Column, Printer, ages,
    cells::{age, count, joined, name, text_or},
};

/// Table printer of a kind.
pub fn printer(kind: &str) -> Printer {
    match kind {
        "ConfigMap" => Printer { columns: CONFIG_MAPS, cells: config_map },
        "Secret" => Printer { columns: SECRETS, cells: secret },
        "Service" => Printer { columns: SERVICES, cells: service },
        "Lease" => Printer { columns: LEASES, cells: lease },
        "Namespace" => Printer { columns: NAMESPACES, cells: namespace },
        "CertificateSigningRequest" => Printer { columns: SIGNING_REQUESTS, cells: signing_request },
        _ => {
            Printer { columns: &[Column::NAME, Column::AGE], cells: |object, now| vec![name(object), age(object, now)] }
        }
    }
}

const CONFIG_MAPS: &[Column] = &[Column::NAME, Column::new("Data"), Column::AGE];

fn config_map(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), count(object, &["/data", "/binaryData"]), age(object, now)]
}

const SECRETS: &[Column] = &[Column::NAME, Column::new("Type"), Column::new("Data"), Column::AGE];

fn secret(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), json!(text(object, "/type")), count(object, &["/data"]), age(object, now)]
}

const NAMESPACES: &[Column] = &[Column::NAME, Column::new("Status"), Column::AGE];

fn namespace(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), json!(text(object, "/status/phase")), age(object, now)]
}

const LEASES: &[Column] = &[Column::NAME, Column::new("Holder"), Column::AGE];

fn lease(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), json!(text(object, "/spec/holderIdentity")), age(object, now)]
}

const SERVICES: &[Column] = &[
    Column::NAME,
    Column::new("Type"),
    Column::new("Cluster-IP"),
    Column::new("External-IP"),
    Column::new("Port(s)"),
    Column::AGE,
    Column::wide("Selector"),
];

fn service(object: &Value, now: Timestamp) -> Vec<Value> {
    let port = |port: &Value| {
        let protocol = match text(port, "/protocol") {
            "" => "TCP",
            protocol => protocol,
        };
        let own = number(port, "/port").unwrap_or_default();
        match number(port, "/nodePort").filter(|port| *port > 0) {
            Some(on_node) => format!("{own}:{on_node}/{protocol}"),
            None => format!("{own}/{protocol}"),
        }
    };
    let ports: Vec<String> = list(object, "/spec/ports").iter().map(port).collect();
    let selector: Vec<String> = fields(object, "/spec/selector")
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
        .collect();
    let external = match text(object, "/spec/externalName") {
        "" => joined(&texts(object, "/spec/externalIPs")),
        name => json!(name),
    };
    vec![
        name(object),
        text_or(object, "/spec/type", "ClusterIP"),
        text_or(object, "/spec/clusterIP", "<none>"),
        external,
        joined(&ports),
        age(object, now),
        joined(&selector),
    ]
}

const SIGNING_REQUESTS: &[Column] = &[
    Column::NAME,
    Column::AGE,
    Column::new("SignerName"),
    Column::new("Requestor"),
    Column::new("RequestedDuration"),
    Column::new("Condition"),
];

fn signing_request(object: &Value, now: Timestamp) -> Vec<Value> {
    let lasts = number(object, "/spec/expirationSeconds").map_or_else(|| "<none>".to_owned(), ages::span);
    let has_condition =
        |kind: &str| list(object, "/status/conditions").iter().any(|condition| condition["type"] == kind);
    let word = match (has_condition("Approved"), has_condition("Denied")) {
        (_, true) => "Denied",
        (true, _) => "Approved",
        _ => "Pending",
    };
    let failed = if has_condition("Failed") { ",Failed" } else { "" };
    let issued = if text(object, "/status/certificate").is_empty() { "" } else { ",Issued" };
    vec![
        name(object),
        age(object, now),
        text_or(object, "/spec/signerName", "<none>"),
        json!(text(object, "/spec/username")),
        json!(lasts),
        json!(format!("{word}{failed}{issued}")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_default_columns_of_kubectl() {
        let shown = |kind: &str, object: Value| json!((printer(kind).cells)(&object, Timestamp::UNIX_EPOCH));
        let map = json!({"metadata": {"name": "m"}, "data": {"a": ""}, "binaryData": {"b": ""}});
        assert_eq!(shown("ConfigMap", map), json!(["m", 2, "<unknown>"]));
        let secret = json!({"metadata": {"name": "s"}, "type": "Opaque"});
        assert_eq!(shown("Secret", secret), json!(["s", "Opaque", 0, "<unknown>"]));
        let service = json!({"metadata": {"name": "s"}, "spec": {"type": "NodePort", "clusterIP": "10.0.0.1", "selector": {"a": "b"},
            "ports": [{"port": 80, "nodePort": 30080}, {"port": 53, "protocol": "UDP"}]}});
        let expected = json!(["s", "NodePort", "10.0.0.1", "<none>", "80:30080/TCP,53/UDP", "<unknown>", "a=b"]);
        assert_eq!(shown("Service", service), expected);
        let lease = json!({"metadata": {"name": "n"}, "spec": {"holderIdentity": "n"}});
        assert_eq!(shown("Lease", lease), json!(["n", "n", "<unknown>"]));
        let request = json!({"metadata": {"name": "c"}, "spec": {"signerName": "k/s", "username": "u"},
            "status": {"conditions": [{"type": "Approved"}], "certificate": "x"}});
        assert_eq!(
            shown("CertificateSigningRequest", request),
            json!(["c", "<unknown>", "k/s", "u", "<none>", "Approved,Issued"])
        );
        assert_eq!(shown("CSINode", json!({"metadata": {"name": "n"}})), json!(["n", "<unknown>"]));
    }
}
