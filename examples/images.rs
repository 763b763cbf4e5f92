//! Writes the demo images as an OCI archive: `cargo run --example images -- FILE`.

use std::path::Path;

use berth_testkit::image;

fn main() -> std::io::Result<()> {
    let target = std::env::args().nth(1).unwrap_or_else(|| "images.tar".to_owned());
    if let Some(folder) = Path::new(&target).parent() {
        std::fs::create_dir_all(folder)?;
    }
    image::write_archive(&[image::Image::busybox(image::BUSYBOX), image::Image::pause()], Path::new(&target))
}
