//! `berth top`: CPU and memory usage of the node and its pods.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    OutputFormat, format_document,
    node_client::{self, NodeClient},
    print,
};
use crate::cli::table::columns;

/// What is shown.
#[derive(Args, Debug)]
pub(in crate::cli) struct Top {
    /// Show only pods of this namespace [default: all namespaces]
    #[arg(short, long)]
    namespace: Option<String>,
    /// Print the usage of containers within a pod
    #[arg(long)]
    containers: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    connection: node_client::ConnectionArguments,
}

/// Subset of the stats summary (`/stats/summary`) that is printed.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct UsageSummary {
    node: Node,
    pods: Vec<Pod>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Node {
    node_name: String,
    cpu: Processor,
    memory: MemoryUsage,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Pod {
    pod_ref: PodReference,
    cpu: Processor,
    memory: MemoryUsage,
    containers: Vec<ContainerUsage>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodReference {
    name: String,
    namespace: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ContainerUsage {
    name: String,
    cpu: Processor,
    memory: MemoryUsage,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Processor {
    usage_nano_cores: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct MemoryUsage {
    working_set_bytes: Option<u64>,
}

/// Prints the usage table or the JSON document.
pub(in crate::cli) async fn list(wanted: Top) -> Result<ExitCode> {
    let client = NodeClient::open(&wanted.connection)?;
    let mut document: Value = client.document("/stats/summary").await?;
    only(&mut document, wanted.namespace.as_deref());
    let text = format_document(document, wanted.output, |mut summary: UsageSummary| {
        summary.pods.sort_by_key(|pod| std::cmp::Reverse((pod.cpu.usage_nano_cores, pod.memory.working_set_bytes)));
        table(&summary, wanted.containers)
    })?;
    print(text)?;
    Ok(ExitCode::SUCCESS)
}

/// Drops pods of other namespaces.
fn only(summary: &mut Value, namespace: Option<&str>) {
    if let (Some(wanted), Some(pods)) = (namespace, summary.get_mut("pods").and_then(Value::as_array_mut)) {
        pods.retain(|pod| pod.pointer("/podRef/namespace") == Some(&json!(wanted)));
    }
}

fn table(summary: &UsageSummary, containers: bool) -> String {
    let head = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let node = &summary.node;
    let used = vec![node.node_name.clone(), cores(&node.cpu), bytes(&node.memory)];
    let node = columns(&[head(&["NODE", "CPU", "MEMORY"]), used]);
    let pods: Vec<Vec<String>> = if containers {
        let of = |pod: &Pod| {
            let PodReference { name, namespace } = &pod.pod_ref;
            let row = |c: &ContainerUsage| {
                vec![namespace.clone(), name.clone(), c.name.clone(), cores(&c.cpu), bytes(&c.memory)]
            };
            pod.containers.iter().map(row).collect::<Vec<_>>()
        };
        let rows = summary.pods.iter().flat_map(of);
        std::iter::once(head(&["NAMESPACE", "POD", "CONTAINER", "CPU", "MEMORY"])).chain(rows).collect()
    } else {
        let row = |pod: &Pod| {
            let PodReference { name, namespace } = &pod.pod_ref;
            vec![namespace.clone(), name.clone(), cores(&pod.cpu), bytes(&pod.memory)]
        };
        std::iter::once(head(&["NAMESPACE", "POD", "CPU", "MEMORY"])).chain(summary.pods.iter().map(row)).collect()
    };
    format!("{node}\n{}", columns(&pods))
}

/// CPU usage in millicores, rounded up.
fn cores(cpu: &Processor) -> String {
    cpu.usage_nano_cores.map_or_else(|| "<unknown>".to_owned(), |nano| format!("{}m", nano.div_ceil(1_000_000)))
}

/// Memory in binary units, as resource limits are written.
fn bytes(memory: &MemoryUsage) -> String {
    const UNITS: [&str; 5] = ["", "Ki", "Mi", "Gi", "Ti"];
    let Some(bytes) = memory.working_set_bytes else { return "<unknown>".to_owned() };
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 9999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.0}{}", UNITS.get(unit).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_get_all_there_is_of_a_namespace() {
        let of = |namespace: &str| json!({"podRef": {"namespace": namespace}, "network": {"rxBytes": 7}});
        let mut summary = json!({"node": {"fs": {"usedBytes": 1}}, "pods": [of("a"), of("b")]});
        only(&mut summary, None);
        assert_eq!(summary["pods"].as_array().map(Vec::len), Some(2));
        only(&mut summary, Some("b"));
        assert_eq!(summary, json!({"node": {"fs": {"usedBytes": 1}}, "pods": [of("b")]}));
    }

    #[test]
    fn usage_is_printed_in_few_digits() {
        let summary: UsageSummary = serde_json::from_value(json!({
            "node": {"nodeName": "n1", "cpu": {"usageNanoCores": 1_500_000_000_u64},
                     "memory": {"workingSetBytes": 17_179_869_184_u64}},
            "pods": [{"podRef": {"name": "p", "namespace": "d"}, "cpu": {"usageNanoCores": 1},
                      "memory": {"workingSetBytes": 9_999},
                      "containers": [{"name": "c", "memory": {"workingSetBytes": 10_240_000}}]}],
        }))
        .expect("a summary");
        let node = "NODE   CPU     MEMORY\nn1     1500m   16Gi\n";
        let pods = "NAMESPACE   POD   CPU   MEMORY\nd           p     1m    9999\n";
        assert_eq!(table(&summary, false), format!("{node}\n{pods}"));
        let containers =
            "NAMESPACE   POD   CONTAINER   CPU         MEMORY\nd           p     c           <unknown>   10Mi\n";
        assert_eq!(table(&summary, true), format!("{node}\n{containers}"));
    }
}
