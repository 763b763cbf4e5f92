//! Machine and version families of `/metrics/cadvisor`. Pure. Implements spec 04b §11, 08 §8.

use super::{
    host::Host,
    page::{push_count, push_family, push_label_value},
    reader::MachineMemory,
};

/// Writes `cadvisor_version_info`: kernel and operating system.
pub(super) fn version(out: &mut Vec<u8>, host: &Host) {
    let help = "A metric with a constant '1' value labeled by kernel version, OS version, docker version, cadvisor \
                version & cadvisor revision.";
    push_family(out, "cadvisor_version_info", help, "gauge");
    out.extend_from_slice(
        b"cadvisor_version_info{cadvisorRevision=\"\",cadvisorVersion=\"\",dockerVersion=\"\",kernelVersion=\"",
    );
    push_label_value(out, &host.kernel);
    out.extend_from_slice(b"\",osVersion=\"");
    push_label_value(out, &host.os);
    out.extend_from_slice(b"\"} 1\n");
}

/// Writes `container_scrape_error` or `machine_scrape_error`.
pub(super) fn scrape_error(out: &mut Vec<u8>, what: &str, failed: bool) {
    let name = format!("{what}_scrape_error");
    // The reference ends one of the two help texts with a full stop.
    let end = if what == "machine" { "." } else { "" };
    let help = format!("1 if there was an error while getting {what} metrics, 0 otherwise{end}");
    push_family(out, &name, &help, "gauge");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(if failed { b" 1\n" } else { b" 0\n" });
}

/// Writes the `machine_*` families; those of memory modules are omitted.
pub(super) fn machine(out: &mut Vec<u8>, host: &Host, memory: MachineMemory) {
    let gauges: [(&str, &str, &[&str], u64); 9] = [
        ("machine_cpu_books", "Number of CPU books.", &[""], 0),
        ("machine_cpu_cores", "Number of logical CPU cores.", &[""], host.cpus),
        ("machine_cpu_drawers", "Number of CPU drawers.", &[""], 0),
        ("machine_cpu_physical_cores", "Number of physical CPU cores.", &[""], host.cores),
        ("machine_cpu_sockets", "Number of CPU sockets.", &[""], host.sockets),
        ("machine_memory_bytes", "Amount of memory installed on the machine.", &[""], memory.total),
        ("machine_nvm_avg_power_budget_watts", "NVM power budget.", &[""], 0),
        (
            "machine_nvm_capacity",
            "NVM capacity value labeled by NVM mode (memory mode or app direct mode).",
            &["app_direct_mode", "memory_mode"],
            0,
        ),
        ("machine_swap_bytes", "Amount of swap memory available on the machine.", &[""], memory.swap_total),
    ];
    for (name, help, modes, value) in gauges {
        if name == "machine_swap_bytes" {
            scrape_error(out, "machine", false);
        }
        push_family(out, name, help, "gauge");
        for mode in modes {
            machine_line(out, host, name, mode, value);
        }
    }
}

fn machine_line(out: &mut Vec<u8>, host: &Host, name: &str, mode: &str, value: u64) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"{boot_id=\"");
    push_label_value(out, &host.boot_id);
    out.extend_from_slice(b"\",machine_id=\"");
    push_label_value(out, &host.machine_id);
    if !mode.is_empty() {
        out.extend_from_slice(b"\",mode=\"");
        push_label_value(out, mode);
    }
    out.extend_from_slice(b"\",system_uuid=\"");
    push_label_value(out, &host.system_uuid);
    out.extend_from_slice(b"\"} ");
    push_count(out, value);
    out.push(b'\n');
}
