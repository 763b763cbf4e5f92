//! Serializes `/stats/summary` as JSON, byte for byte in the reference's layout. Pure.
//!
//! Indentation is one space per level, unset optional fields are omitted, and there is no trailing newline. Times are
//! whole seconds in UTC; 0 is written as `null`. Implements spec 04b §7, §7.1.

use jiff::Timestamp;

use super::{
    cgroup_files::{Pressure, PressureStats},
    network::LinkCounters,
    reading::WallNs,
    summary::{
        ContainerStats, CpuStats, FsStats, MemoryStats, NetworkStats, NodeStats, PodStats, Resources, StatsSummary,
        SwapStats, VolumeStats,
    },
};

/// Returns the JSON document of a summary.
pub fn write(summary: &StatsSummary) -> Vec<u8> {
    let mut json = Json { out: Vec::with_capacity(4096 + summary.pods.len() * 8192), depth: 0, is_first: true };
    json.open(b'{');
    json.key("node");
    node(&mut json, &summary.node);
    json.list("pods", &summary.pods, pod);
    json.close(b'}');
    json.out
}

fn node(json: &mut Json, node: &NodeStats) {
    json.open(b'{');
    json.text("nodeName", &node.name);
    if !node.system.is_empty() {
        json.list("systemContainers", &node.system, container);
    }
    json.time("startTime", node.started_at);
    resources(json, &node.usage);
    json.member("network", node.network.as_ref(), network);
    json.member("fs", node.fs.as_ref(), |json, fs| {
        json.open(b'{');
        filesystem(json, fs);
        json.close(b'}');
    });
    json.member("runtime", node.runtime.as_ref(), |json, (images, layers)| {
        json.open(b'{');
        for (key, fs) in [("imageFs", images), ("containerFs", layers)] {
            json.member(key, fs.as_ref(), plain_filesystem);
        }
        json.close(b'}');
    });
    json.member("rlimit", node.rlimit.as_ref(), |json, (at, processes)| {
        json.open(b'{');
        json.time("time", *at);
        json.number("maxpid", processes.max);
        json.number("curproc", Some(processes.now));
        json.close(b'}');
    });
    json.member("swap", node.usage.swap.as_ref(), swap);
    json.close(b'}');
}

fn pod(json: &mut Json, pod: &PodStats) {
    json.open(b'{');
    json.key("podRef");
    json.open(b'{');
    json.text("name", &pod.id.name);
    json.text("namespace", &pod.id.namespace);
    json.text("uid", pod.id.uid.as_str());
    json.close(b'}');
    json.time("startTime", pod.started_at);
    json.list("containers", &pod.containers, container);
    resources(json, &pod.usage);
    json.member("network", pod.network.as_ref(), network);
    if !pod.volumes.is_empty() {
        json.list("volume", &pod.volumes, volume);
    }
    json.member("ephemeral-storage", pod.ephemeral_storage.as_ref(), plain_filesystem);
    json.member("process_stats", pod.processes.as_ref(), |json, count| {
        json.open(b'{');
        json.number("process_count", Some(*count));
        json.close(b'}');
    });
    json.member("swap", pod.usage.swap.as_ref(), swap);
    json.close(b'}');
}

fn container(json: &mut Json, container: &ContainerStats) {
    json.open(b'{');
    json.text("name", &container.name);
    json.time("startTime", container.started_at.as_second());
    resources(json, &container.usage);
    json.member("rootfs", container.rootfs.as_ref(), plain_filesystem);
    json.member("logs", container.logs.as_ref(), plain_filesystem);
    json.member("swap", container.usage.swap.as_ref(), swap);
    json.close(b'}');
}

/// Writes CPU, memory, and I/O. Swap is written by the callers, after other members.
fn resources(json: &mut Json, usage: &Resources) {
    json.member("cpu", usage.cpu.as_ref(), cpu);
    json.member("memory", usage.memory.as_ref(), memory);
    json.member("io", usage.io.as_ref(), |json, (at, stalls)| {
        json.open(b'{');
        json.wall("time", *at);
        json.member("psi", Some(stalls), psi);
        json.close(b'}');
    });
}

fn cpu(json: &mut Json, cpu: &CpuStats) {
    json.open(b'{');
    json.wall("time", cpu.at);
    json.number("usageNanoCores", cpu.usage_nano_cores);
    json.number("usageCoreNanoSeconds", cpu.usage_core_nano_seconds);
    json.member("psi", cpu.psi.as_ref(), psi);
    json.close(b'}');
}

fn memory(json: &mut Json, memory: &MemoryStats) {
    json.open(b'{');
    json.wall("time", memory.at);
    json.number("availableBytes", memory.available);
    json.number("usageBytes", memory.usage);
    json.number("workingSetBytes", memory.working_set);
    json.number("rssBytes", memory.rss);
    json.number("pageFaults", memory.page_faults);
    json.number("majorPageFaults", memory.major_page_faults);
    json.member("psi", memory.psi.as_ref(), psi);
    json.close(b'}');
}

fn swap(json: &mut Json, swap: &SwapStats) {
    json.open(b'{');
    json.wall("time", swap.at);
    json.number("swapAvailableBytes", swap.available);
    json.number("swapUsageBytes", swap.usage);
    json.close(b'}');
}

fn psi(json: &mut Json, stalls: &PressureStats) {
    json.open(b'{');
    for (key, line) in [("full", &stalls.full), ("some", &stalls.some)] {
        json.member(key, Some(line), pressure);
    }
    json.close(b'}');
}

fn pressure(json: &mut Json, line: &Pressure) {
    json.open(b'{');
    json.number("total", Some(line.total));
    for (key, share) in [("avg10", line.avg10), ("avg60", line.avg60), ("avg300", line.avg300)] {
        json.key(key);
        json.out.extend_from_slice(share.to_string().as_bytes());
    }
    json.close(b'}');
}

fn network(json: &mut Json, stats: &NetworkStats) {
    json.open(b'{');
    json.wall("time", stats.at);
    let primary = stats.network.primary.and_then(|at| stats.network.interfaces.get(at));
    match primary {
        Some(primary) => interface_members(json, primary),
        None => json.text("name", ""),
    }
    json.list("interfaces", &stats.network.interfaces, |json, interface| {
        json.open(b'{');
        interface_members(json, interface);
        json.close(b'}');
    });
    json.close(b'}');
}

fn interface_members(json: &mut Json, interface: &LinkCounters) {
    json.text("name", &interface.name);
    json.number("rxBytes", Some(interface.received.bytes));
    json.number("rxErrors", Some(interface.received.errors));
    json.number("txBytes", Some(interface.sent.bytes));
    json.number("txErrors", Some(interface.sent.errors));
}

fn plain_filesystem(json: &mut Json, fs: &FsStats) {
    json.open(b'{');
    filesystem(json, fs);
    json.close(b'}');
}

fn filesystem(json: &mut Json, fs: &FsStats) {
    json.time("time", fs.at);
    json.number("availableBytes", fs.available);
    json.number("capacityBytes", fs.capacity);
    json.number("usedBytes", fs.used);
    json.number("inodesFree", fs.inodes_free);
    json.number("inodes", fs.inodes);
    json.number("inodesUsed", fs.inodes_used);
}

fn volume(json: &mut Json, volume: &VolumeStats) {
    json.open(b'{');
    filesystem(json, &volume.fs);
    json.text("name", &volume.name);
    json.member("pvcRef", volume.claim.as_ref(), |json, (namespace, name)| {
        json.open(b'{');
        json.text("name", name);
        json.text("namespace", namespace);
        json.close(b'}');
    });
    json.member("volumeHealthStats", volume.is_abnormal, |json, is_abnormal| {
        json.open(b'{');
        json.truth("abnormal", is_abnormal);
        json.close(b'}');
    });
    json.close(b'}');
}

/// JSON writer with the state of the current nesting level.
struct Json {
    out: Vec<u8>,
    depth: usize,
    is_first: bool,
}

impl Json {
    fn open(&mut self, bracket: u8) {
        self.out.push(bracket);
        self.depth += 1;
        self.is_first = true;
    }

    fn close(&mut self, bracket: u8) {
        self.depth = self.depth.saturating_sub(1);
        if !self.is_first {
            self.line();
        }
        self.out.push(bracket);
        self.is_first = false;
    }

    fn line(&mut self) {
        self.out.push(b'\n');
        self.out.resize(self.out.len() + self.depth, b' ');
    }

    fn next(&mut self) {
        if !self.is_first {
            self.out.push(b',');
        }
        self.is_first = false;
        self.line();
    }

    fn key(&mut self, key: &str) {
        self.next();
        self.out.push(b'"');
        self.out.extend_from_slice(key.as_bytes());
        self.out.extend_from_slice(b"\": ");
    }

    fn member<T>(&mut self, key: &str, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        if let Some(value) = value {
            self.key(key);
            write(self, value);
        }
    }

    fn list<T>(&mut self, key: &str, items: &[T], write: impl Fn(&mut Self, &T)) {
        self.key(key);
        self.open(b'[');
        for item in items {
            self.next();
            write(self, item);
        }
        self.close(b']');
    }

    fn number(&mut self, key: &str, value: Option<u64>) {
        if let Some(value) = value {
            self.key(key);
            super::page::push_integer(&mut self.out, value);
        }
    }

    fn truth(&mut self, key: &str, value: bool) {
        self.key(key);
        self.out.extend_from_slice(if value { b"true" } else { b"false" });
    }

    fn wall(&mut self, key: &str, at: WallNs) {
        self.time(key, at.div_euclid(1_000_000_000));
    }

    fn time(&mut self, key: &str, seconds: i64) {
        self.key(key);
        match Timestamp::from_second(seconds) {
            Ok(at) if seconds != 0 => {
                self.out.push(b'"');
                self.out.extend_from_slice(at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().as_bytes());
                self.out.push(b'"');
            }
            _ => self.out.extend_from_slice(b"null"),
        }
    }

    fn text(&mut self, key: &str, value: &str) {
        self.key(key);
        self.out.push(b'"');
        for c in value.chars() {
            match c {
                '"' | '\\' => self.out.extend_from_slice(&[b'\\', c as u8]),
                '\n' => self.out.extend_from_slice(b"\\n"),
                '\r' => self.out.extend_from_slice(b"\\r"),
                '\t' => self.out.extend_from_slice(b"\\t"),
                // The reference escapes characters that a browser could interpret as markup.
                '\0'..='\x1f' | '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                    self.out.extend_from_slice(format!("\\u{:04x}", u32::from(c)).as_bytes());
                }
                c => self.out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        self.out.push(b'"');
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{reading::Depth, testing as sample},
        *,
    };

    fn text(depth: Depth) -> String {
        let summary = sample::summary(depth, |_, _| {}).expect("made");
        String::from_utf8(write(&summary)).expect("text")
    }

    #[test]
    fn the_full_form_to_the_byte() {
        let page = text(Depth::Summary);
        let mut lines = page.lines();
        assert_eq!(
            (lines.next(), lines.next(), lines.next()),
            (Some("{"), Some(" \"node\": {"), Some("  \"nodeName\": \"node-1\",")),
            "AC-04b-M4"
        );
        assert!(page.ends_with("\n ]\n}"), "no newline at the end");
        let pods = page.split_once(" \"pods\": ").expect("pods").1;
        let expected = r#"[
  {
   "podRef": {
    "name": "web",
    "namespace": "default",
    "uid": "uid-web"
   },
   "startTime": "2021-05-03T00:00:00Z",
   "containers": [
    {
     "name": "main",
     "startTime": "2021-05-03T00:00:00Z",
     "cpu": {
      "time": "2021-06-22T21:11:18Z",
      "usageCoreNanoSeconds": 5000000000
     },
     "memory": {
      "time": "2021-06-22T21:11:18Z",
      "usageBytes": 500,
      "workingSetBytes": 350,
      "rssBytes": 250,
      "pageFaults": 7,
      "majorPageFaults": 1
     },
     "rootfs": {
      "time": "2021-06-22T21:11:18Z",
      "availableBytes": 30,
      "capacityBytes": 100,
      "usedBytes": 7,
      "inodesFree": 15,
      "inodes": 20,
      "inodesUsed": 3
     },
"#;
        assert!(pods.starts_with(expected), "{pods}");
        let document: serde_json::Value = serde_json::from_str(&page).expect("JSON");
        let pod = &document["pods"][0];
        let keys = |value: &serde_json::Value| {
            value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            keys(pod),
            "podRef startTime containers cpu memory network volume ephemeral-storage process_stats swap"
        );
        assert_eq!(keys(&document["node"]), "nodeName systemContainers startTime cpu memory fs runtime rlimit swap");
        assert_eq!(keys(&pod["containers"][0]), "name startTime cpu memory rootfs logs swap");
        assert_eq!(pod["volume"][1]["pvcRef"], serde_json::json!({"name": "claim", "namespace": "default"}));
        // A volume without a health report has no `volumeHealthStats`.
        assert!(pod["volume"][0].get("volumeHealthStats").is_none());
        assert_eq!(pod["volume"][1]["volumeHealthStats"], serde_json::json!({"abnormal": true}));
        assert_eq!(pod["network"]["name"], "eth0");
        assert_eq!(document["node"]["rlimit"]["maxpid"], 4096);
        // AC-04b-M6: without a limit, `availableBytes` is absent.
        assert!(pod["containers"][0]["memory"].get("availableBytes").is_none());
    }

    #[test]
    fn the_short_form_has_processor_memory_and_swap() {
        // AC-04b-M1
        let page = text(Depth::Core);
        for absent in ["\"fs\"", "\"network\"", "\"volume\"", "\"rlimit\"", "\"io\"", "\"logs\"", "\"process_stats\""] {
            assert!(!page.contains(absent), "{absent}");
        }
        let document: serde_json::Value = serde_json::from_str(&page).expect("JSON");
        assert_eq!(document["pods"][0]["swap"]["swapUsageBytes"], 10);
        assert_eq!(document["node"]["swap"]["swapAvailableBytes"], 5);
        assert_eq!(document["node"]["startTime"], "2020-09-13T12:26:40Z");
    }

    #[test]
    fn odd_values_stay_json() {
        let summary = sample::summary(Depth::Summary, |snapshot, _| {
            snapshot.pods[0].pod.id.name = "a\"b\\c<d>\n\u{1}é\u{2028}".into();
            snapshot.pods[0].pod.started_at = Timestamp::UNIX_EPOCH;
            snapshot.pods[0].group = None;
            snapshot.pods[0].containers = vec![None, None];
        });
        let page = String::from_utf8(write(&summary.expect("made"))).expect("text");
        assert!(page.contains(r#""name": "a\"b\\c\u003cd\u003e\n\u0001é\u2028","#), "{page}");
        assert!(page.contains("\"startTime\": null"));
        let document: serde_json::Value = serde_json::from_str(&page).expect("JSON");
        assert_eq!(document["pods"][0]["podRef"]["name"], "a\"b\\c<d>\n\u{1}é\u{2028}");
        assert!(document["pods"][0]["containers"][1].get("cpu").is_none());
    }

    #[test]
    fn an_empty_node_is_complete() {
        let summary = sample::summary(Depth::Core, |snapshot, _| {
            snapshot.pods.clear();
            snapshot.system.clear();
        });
        let page = String::from_utf8(write(&summary.expect("made"))).expect("text");
        assert!(page.ends_with(" \"pods\": []\n}") && !page.contains("systemContainers"), "{page}");
    }
}
