"""What is on disk: file headers, schemes, layouts, the manifest. Shared by the toolkit and the runtime."""
