//! `berth devices`: lists the devices of device plugins and the containers that have them.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde::Deserialize;
use serde_json::Value;

use super::{
    OutputFormat, format_document, in_colour,
    node_client::{self, NodeClient},
    print,
};
use crate::cli::table::{Cell, Color, painted};

/// Output format and connection.
#[derive(Args, Debug)]
pub(in crate::cli) struct DevicesArguments {
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    connection: node_client::ConnectionArguments,
}

/// Document of `/debug/devices`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct DeviceDocument {
    devices: Vec<DeviceRow>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DeviceRow {
    resource: String,
    id: String,
    health: String,
    numa_nodes: Vec<i64>,
    assigned_to: Vec<ContainerOfPod>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ContainerOfPod {
    namespace: String,
    pod: String,
    uid: String,
    container: String,
}

/// Prints the devices.
pub(in crate::cli) async fn list(wanted: DevicesArguments) -> Result<ExitCode> {
    let client = NodeClient::open(&wanted.connection)?;
    let document: Value = client.document("/debug/devices").await?;
    let text = format_document(document, wanted.output, |document: DeviceDocument| {
        if document.devices.is_empty() {
            eprintln!("No devices found.");
            return String::new();
        }
        table(&document.devices, in_colour())
    })?;
    print(text)?;
    Ok(ExitCode::SUCCESS)
}

/// Renders one row per device, or one per container that has it. Pure.
fn table(devices: &[DeviceRow], in_colour: bool) -> String {
    let head = ["RESOURCE", "DEVICE", "HEALTH", "NUMA", "NAMESPACE", "POD", "CONTAINER"];
    let mut rows: Vec<Vec<Cell>> = vec![head.into_iter().map(Cell::from).collect()];
    for device in devices {
        if device.assigned_to.is_empty() {
            rows.push(row(device, None));
        }
        rows.extend(device.assigned_to.iter().map(|container| row(device, Some(container))));
    }
    painted(&rows, in_colour)
}

fn row(device: &DeviceRow, assigned_to: Option<&ContainerOfPod>) -> Vec<Cell> {
    let text = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let nodes: Vec<String> = device.numa_nodes.iter().map(i64::to_string).collect();
    let colour = if device.health == "Healthy" { Color::Green } else { Color::Red };
    let (namespace, pod, container) = assigned_to.map_or(("", "", ""), |assigned| {
        // The UID stands for the name of a pod that no source has and that has no worker.
        let pod = if assigned.pod.is_empty() { &assigned.uid } else { &assigned.pod };
        (assigned.namespace.as_str(), pod.as_str(), assigned.container.as_str())
    });
    vec![
        device.resource.clone().into(),
        device.id.clone().into(),
        Cell::painted(device.health.clone(), Some(colour)),
        text(&nodes.join(",")).into(),
        text(namespace).into(),
        text(pod).into(),
        text(container).into(),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_per_device_and_container() {
        let gpu = "example.com/gpu";
        let init = json!({"namespace": "n", "pod": "web", "uid": "u", "container": "setup"});
        let main = json!({"namespace": "n", "pod": "web", "uid": "u", "container": "main"});
        let unknown = json!({"namespace": "", "pod": "", "uid": "0f3c", "container": "c"});
        let document: DeviceDocument = serde_json::from_value(json!({"devices": [
            {"resource": gpu, "id": "gpu0", "health": "Healthy", "numaNodes": [0], "assignedTo": [init, main]},
            {"resource": gpu, "id": "gpu1", "health": "Unhealthy", "numaNodes": [0, 1], "assignedTo": []},
            {"resource": gpu, "id": "odd\u{1b}[2J", "health": "Unhealthy", "numaNodes": [], "assignedTo": [unknown]},
        ]}))
        .expect("a document");
        let text = table(&document.devices, false);
        let expected = "\
RESOURCE          DEVICE    HEALTH      NUMA   NAMESPACE   POD    CONTAINER
example.com/gpu   gpu0      Healthy     0      n           web    setup
example.com/gpu   gpu0      Healthy     0      n           web    main
example.com/gpu   gpu1      Unhealthy   0,1    -           -      -
example.com/gpu   odd\u{fffd}[2J   Unhealthy   -      -           0f3c   c
";
        assert_eq!(text, expected);
        let text = table(&document.devices, true);
        assert!(text.contains("\u{1b}[32mHealthy\u{1b}[0m     0 ") && text.contains("\u{1b}[31mUnhealthy"), "{text:?}");
    }
}
